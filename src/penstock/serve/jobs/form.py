"""Reads a form with one file (multipart/form-data, RFC 7578) piece by piece, so that the file is never in memory as a whole."""

from __future__ import annotations

from email.message import Message

from penstock.serve.errors import ApiError, invalid, shorten

FILE = "file"
MAX_PARTS, MAX_HEAD_BYTES, MAX_FIELD_BYTES, MAX_BOUNDARY_BYTES = 16, 4096, 1024, 200
_LINE, _HEAD_END = b"\r\n", b"\r\n\r\n"


class Form:
    def __init__(self, content_type: str) -> None:
        """Raise 400 for another type of body than a form."""
        # The standard library takes quadratic time for a header of many semicolons.
        boundary = _param("Content-Type", content_type[:MAX_HEAD_BYTES], "boundary")
        is_form = content_type.partition(";")[0].strip().lower() == "multipart/form-data"
        if not is_form or not 0 < len(boundary) <= MAX_BOUNDARY_BYTES:
            raise invalid("Send the file as a form: multipart/form-data with the fields 'purpose' and 'file'.")
        self.fields: dict[str, str] = {}
        self.file_name: str | None = None
        """Set as soon as the file has begun."""
        self._delimiter = b"\r\n--" + boundary.encode("latin-1", "replace")
        self._buffer = _LINE
        """Bytes that are not read yet. The first delimiter may be at the very beginning, without a line before it."""
        self._name: str | None = None
        """Name of the part that is being read; None before the first one."""
        self._is_in_head = False
        self._part = b""
        self._num_parts = 0
        self._has_ended = False

    def feed(self, data: bytes) -> bytes:
        """Read a piece of the body. Return what it has of the file. Raises 400."""
        self._buffer += data
        pieces: list[bytes] = []
        while not self._has_ended and (self._read_head() if self._is_in_head else self._read_part(pieces)):
            continue
        if self._has_ended:
            self._buffer = b""
        return b"".join(pieces)

    def end(self) -> None:
        """Raise 400 unless the form is whole and has a file."""
        if not self._has_ended:
            raise invalid("The form ends in the middle.")
        if self.file_name is None:
            raise invalid(f"Missing required parameter: '{FILE}'.", FILE)

    def _read_part(self, pieces: list[bytes]) -> bool:
        """Read the content of a part, or what stands before the first one. Return whether its end was found."""
        end = self._buffer.find(self._delimiter)
        ready = end if end >= 0 else len(self._buffer) - len(self._delimiter) + 1
        if ready > 0:
            self._add(self._buffer[:ready], pieces)
            self._buffer = self._buffer[ready:]
        if end >= 0:
            self._end_part()
            self._buffer = self._buffer[len(self._delimiter) :]
            self._is_in_head = True
        return end >= 0

    def _read_head(self) -> bool:
        """Read the headers of the next part, with the line end before them. Return whether they are complete."""
        if self._buffer.startswith(b"--"):
            self._has_ended = True
            return True
        if len(self._buffer) >= 2 and not self._buffer.startswith(_LINE):
            raise _malformed("a boundary is followed by something else than a part")
        end = self._buffer.find(_HEAD_END)
        if end < 0 or end > MAX_HEAD_BYTES:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise _malformed(f"the headers of a part have more than {MAX_HEAD_BYTES} bytes")
            return False
        self._begin_part(self._buffer[:end])
        self._buffer = self._buffer[end + len(_HEAD_END) :]
        if self._buffer.startswith(self._delimiter[2:]):  # an empty part may end with its headers' line
            self._buffer = _LINE + self._buffer
        self._is_in_head = False
        return True

    def _begin_part(self, head: bytes) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise invalid(f"The form has more than {MAX_PARTS} parts.")
        self._name, self._part = "", b""
        for line in head.split(_LINE):
            header, _, value = line.decode("utf-8", "replace").partition(":")
            if header.strip().lower() == "content-disposition":
                self._name = _param("Content-Disposition", value, "name")
                if self._name == FILE:
                    if self.file_name is not None:
                        raise invalid("The form has two files. Send one.", FILE)
                    self.file_name = _param("Content-Disposition", value, "filename")[:255]

    def _add(self, data: bytes, pieces: list[bytes]) -> None:
        if self._name == FILE:
            pieces.append(data)
        elif self._name is not None:
            self._part += data
            if len(self._part) > MAX_FIELD_BYTES:
                raise invalid(f"The form's field {shorten(self._name)!r} has more than {MAX_FIELD_BYTES} bytes.")

    def _end_part(self) -> None:
        if self._name is not None and self._name != FILE:
            self.fields[self._name] = self._part.decode("utf-8", "replace")


def _param(header: str, value: str, name: str) -> str:
    """Return a parameter of a header, or an empty text. Raises 400."""
    message = Message()
    message[header] = "".join(char for char in value if char.isprintable()).strip()
    try:
        found = message.get_param(name, "", header)
    except TypeError:  # it sorts the parts of a parameter (RFC 2231), and one may lack a number
        raise _malformed(f"{header} has a parameter both whole and in parts") from None
    # Percent-encoded bytes (RFC 8187) are found as Latin-1. They are UTF-8.
    return found[2].encode("latin-1", "replace").decode("utf-8", "replace") if isinstance(found, tuple) else str(found)


def _malformed(what: str) -> ApiError:
    return invalid(f"The form can't be read: {what}.")
