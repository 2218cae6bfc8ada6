"""Which stage runs where a call names none."""
import os

from . import abi
from ._library import library

_chosen = {"forward": None, "backward": None}
_fallback = {"forward": ("FLASHSTEPS_STAGE", "08"), "backward": ("FLASHSTEPS_BACKWARD_STAGE", "09")}


def default_stage(which="forward"):
    """The id of the stage that runs where a call names none; `which` is "forward" or "backward". The last
    set_default_stage() decides, else the environment variable FLASHSTEPS_STAGE or FLASHSTEPS_BACKWARD_STAGE, else it is 08
    or 09."""
    variable, fallback = _fallback[which]
    return _chosen[which] or os.environ.get(variable) or fallback


def set_default_stage(stage=None, backward=None):
    """Chooses the stages that run where a call names none, in all threads of this process.

    stage: of the forward pass, "08" or "02b"; None: that of the environment again
    backward: of the backward pass, "09"; None: likewise

    Raises abi.BadInput for a stage that the library does not have, and leaves all as it was."""
    chosen = {"forward": stage, "backward": backward}
    for which, wanted in chosen.items():
        if wanted is not None:
            ids_of = library().stages if which == "forward" else library().backward_stages
            known = sorted({*ids_of(abi.MODEL), *ids_of(abi.CUDA)})
            if not isinstance(wanted, str) or not any(wanted in (name, name[:2]) for name in known):
                raise abi.BadInput(f"there is no stage {wanted!r} of the {which} pass; there are {', '.join(known)}")
    _chosen.update(chosen)


def id_of(stage, which):
    """The bytes that the C interface takes for a call's `stage`, None meaning the default. Raises TypeError."""
    stage = default_stage(which) if stage is None else stage
    if not isinstance(stage, str):
        raise TypeError(f"stage is {stage!r}; allowed: a string, as in '08'")
    return stage.encode(errors="replace")
