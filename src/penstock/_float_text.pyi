"""What the compiled module offers: native/float_text.cpp."""

from typing_extensions import Buffer

def text_of_floats(array: Buffer, /) -> bytes:
    """Return a contiguous float32 array, [columns] or [rows, columns], as JSON. NaN and infinities are null.

    Raises ValueError for another array.
    """
