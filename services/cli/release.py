"""Which release of Samovar this is."""

from importlib.metadata import PackageNotFoundError, version


def release() -> str:
    """The installed package's version; `(from source)` where the tree runs without being installed."""
    try:
        return version("samovar")
    except PackageNotFoundError:
        return "(from source)"
