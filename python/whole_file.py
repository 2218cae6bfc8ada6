"""Writing files so that nobody ever sees half of one."""
import contextlib
import os


def write(path, text):
    """Writes the text beside `path` and renames it to that. A device or a pipe is written to as it is. Raises OSError,
    and leaves nothing beside it."""
    special = os.path.exists(path) and not os.path.isfile(path)
    beside = path if special else f"{path}.{os.getpid()}.new"
    try:
        with open(beside, "w", encoding="utf-8") as file:
            file.write(text)
        if not special:
            os.replace(beside, path)
    except OSError:
        if not special:
            with contextlib.suppress(OSError):
                os.remove(beside)
        raise
