"""Finds libflashsteps.so and loads it once."""
import os
import pathlib
import threading

from . import abi

NAME = "libflashsteps.so"
PRESETS = ("cuda", "full", "model")  # whose build folders are searched first, in this order

_lock = threading.Lock()
_loaded = None


def source_tree():
    """The folder of the project's sources that this package belongs to; None where there is none."""
    here = pathlib.Path(__file__).resolve().parent
    candidates = [here.parent.parent]
    try:
        from ._source_tree import SOURCE_TREE  # written by an installation: whence it was installed
        candidates.append(pathlib.Path(SOURCE_TREE))
    except ImportError:
        pass
    return next((folder for folder in candidates if (folder / "common/capi/flashsteps.h").is_file()), None)


def find():
    """The path of the library: $FLASHSTEPS_LIBRARY alone where it is set, else beside this package, else in the build
    folders of the source tree, `cuda`, `full` and `model` before others. Raises abi.Unavailable."""
    given = os.environ.get("FLASHSTEPS_LIBRARY")
    if given:
        if not pathlib.Path(given).is_file():
            raise abi.Unavailable(f"FLASHSTEPS_LIBRARY is {given}; there is no such file")
        return pathlib.Path(given)
    beside = pathlib.Path(__file__).resolve().parent / NAME
    if beside.is_file():
        return beside
    tree = source_tree()
    if tree:
        others = sorted(path.name for path in (tree / "build").glob("*") if path.name not in PRESETS)
        for folder in (*PRESETS, *others):
            path = tree / "build" / folder / "lib" / NAME
            if path.is_file():
                return path
    raise abi.Unavailable(f"{NAME} was not found; build it with 'cmake --preset model && cmake --build build/model --target "
                          f"flashsteps' in {tree or 'the source tree'} (cuda in place of model for a card), or set "
                          "FLASHSTEPS_LIBRARY to its path")


def library():
    """The library that this package calls, an abi.Library; `library().path` says which file it is. It is found and loaded
    at the first call, and kept. Raises abi.Unavailable where there is none, abi.BadInput where it cannot be loaded."""
    global _loaded
    if _loaded is None:
        with _lock:
            if _loaded is None:
                _loaded = abi.Library(find())
    return _loaded
