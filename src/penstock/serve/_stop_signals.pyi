"""What the compiled module offers: native/stop_signals.cpp."""

def end_at_second(*numbers: int) -> None:
    """The second of these signals, counted from now on, ends the process at once, with the exit code 128 + its number.

    Within a tenth of a second of the first it is not counted. The first goes to its handler, set before by `signal.signal`,
    which also takes this off again. Raises ValueError if there is none.
    """
