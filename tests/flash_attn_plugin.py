"""Runs the flash-attn package's own tests against a stage: a plugin for pytest.

    cd …/flash-attention/tests                                        its sources are no part of this repository
    PYTHONPATH=…/python:…/tests python3 -m pytest -q -p flash_attn_plugin test_flash_attn.py \\
        -k "(test_flash_attn_output or test_flash_attn_qkvpacked or test_flash_attn_causal or test_flash_attn_bwd) and not varlen"

What FLASHSTEPS_STAGE and FLASHSTEPS_BACKWARD_STAGE name takes the place of its functions, before its tests import them; the
package itself need not be installed. Of the tests' parameters those are left out that stages do not have (dropout, windows, ALiBi,
softcap, a head_dim above 128); what else raises NotImplementedError (lengths that vary, key-value caches) is skipped with its
name. Needs torch, pytest and einops.
"""
import importlib.util
import sys
import types

import pytest

import flashsteps

FUNCTIONS = ("flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func")
PACKAGE = "flash_attn"
PARTS = ("flash_attn_interface", "bert_padding", "layers", "layers.rotary")  # that its tests import
# Values of the tests' parameters that stages support.
SUPPORTED = {"dropout_p": lambda value: value == 0, "softcap": lambda value: value == 0, "local": lambda value: not value,
             "alibi": lambda value: not value, "d": lambda value: value <= 128}


class Absent(types.ModuleType):
    """A module of the package where that is not installed: whatever is taken from it cannot be called."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name.isupper():  # a constant; those that tests ask for say that something is there
            return False

        def function(*_arguments, **_options):
            raise NotImplementedError(f"{name}: flashsteps has no such function")
        return function


def pytest_configure():
    """Puts the stages' functions in their place."""
    if importlib.util.find_spec(PACKAGE) is None:
        for name in (PACKAGE, *(f"{PACKAGE}.{part}" for part in PARTS)):
            sys.modules[name] = Absent(name)
            sys.modules[name].__path__ = []
    import flash_attn
    from flash_attn import flash_attn_interface
    for module in (flash_attn, flash_attn_interface):
        for name in FUNCTIONS:
            setattr(module, name, getattr(flashsteps, name))


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc):
    """Leaves out values that stages do not support, where there are others: half a million tests become some thousand."""
    for mark in metafunc.definition.iter_markers("parametrize"):
        supported = SUPPORTED.get(mark.args[0])
        if supported and any(map(supported, mark.args[1])):
            mark.args[1][:] = filter(supported, mark.args[1])


def pytest_report_header():
    """Which stages, of which library."""
    library = flashsteps.library()
    return (f"flashsteps: stage {flashsteps.default_stage()}, backward pass {flashsteps.default_stage('backward')}, "
            f"{library.path}, commit {library.commit or 'unknown'}")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """A test of what is not supported is skipped, and says so."""
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    try:
        pyfuncitem.obj(**arguments)
    except NotImplementedError as error:
        pytest.skip(str(error))
    return True
