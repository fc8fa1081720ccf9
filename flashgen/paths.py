"""Where files live. The only module that reads the environment: FLASHGEN_HOME, and CuPy's CUPY_CACHE_DIR in order to report it."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path

import platformdirs

ENVIRONMENT_VARIABLE = "FLASHGEN_HOME"


def home() -> Path:
    """The directory of tables, cubins, studies and emulated libraries; not created here.

    The default is the user *data* directory, because cache directories get wiped.
    """
    chosen = os.environ.get(ENVIRONMENT_VARIABLE)
    return Path(chosen) if chosen else Path(platformdirs.user_data_dir("flashgen"))


def user_tables() -> Path:
    """Tables written by `flashgen tune`."""
    return home() / "tables"


def cubin_store() -> Path:
    """Compiled kernels, content-addressed."""
    return home() / "cubins"


def study_store() -> Path:
    """Journals of searches, one per problem, device and space."""
    return home() / "studies"


def proof_store() -> Path:
    """Quick certificates that were given on this machine to entries certified elsewhere."""
    return home() / "proofs"


def emulation_store() -> Path:
    """Host libraries built from sources for the emulated executor."""
    return home() / "emulated"


def cupy_cache() -> Path:
    """CuPy's own kernel cache, which flashgen neither reads nor writes; it can fail by itself."""
    return Path(os.environ.get("CUPY_CACHE_DIR") or Path("~/.cupy/kernel_cache").expanduser())


def shipped_tables() -> Path:
    """Tables inside the package."""
    return Path(str(files("flashgen"))) / "tables"


def templates() -> Path:
    """The template tree, in a checkout or inside the wheel."""
    return _data("templates")


def search_spaces() -> Path:
    """The search-space files, in a checkout or inside the wheel."""
    return _data("search_spaces")


def _data(name: str) -> Path:
    packaged = Path(str(files("flashgen"))) / "_data" / name
    if packaged.is_dir():
        return packaged
    return Path(__file__).resolve().parents[1] / name
