"""Reads a form with one file (multipart/form-data) piece by piece, so that the file is never in memory as a whole."""

from __future__ import annotations

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from penstock.serve.errors import ApiError, invalid, shorten

FILE = "file"
MAX_FIELDS, MAX_FIELD_BYTES = 16, 1024


class Form:
    def __init__(self, content_type: str) -> None:
        """Raise 400 for another type of body than a form."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise invalid("Send the file as a form: multipart/form-data with the fields 'purpose' and 'file'.")
        self.fields: dict[str, str] = {}
        self.file_name: str | None = None
        """Set as soon as the file has begun."""
        self._name = ""
        self._header, self._value = b"", b""
        self._part = bytearray()
        self._file: list[bytes] = []
        self._has_ended = False
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin_part,
                    "on_header_field": self._add_to_header,
                    "on_header_value": self._add_to_value,
                    "on_header_end": self._end_header,
                    "on_part_data": self._add_to_part,
                    "on_part_end": self._end_part,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise _malformed(error) from None

    def feed(self, data: bytes) -> bytes:
        """Read a piece of the body. Return what it has of the file. Raises 400."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _malformed(error) from None
        found, self._file = b"".join(self._file), []
        return found

    def end(self) -> None:
        """Raise 400 unless the form is whole and has a file."""
        if not self._has_ended:
            raise invalid("The form ends in the middle.")
        if self.file_name is None:
            raise invalid(f"Missing required parameter: '{FILE}'.", FILE)

    def _begin_part(self) -> None:
        self._name, self._part = "", bytearray()
        self._header, self._value = b"", b""

    def _add_to_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _add_to_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, options = parse_options_header(self._value)
            self._name = options.get(b"name", b"").decode("utf-8", "replace")
            if self._name == FILE:
                if self.file_name is not None:
                    raise invalid("The form has two files. Send one.", FILE)
                self.file_name = options.get(b"filename", b"").decode("utf-8", "replace")[:255]
        self._header, self._value = b"", b""

    def _add_to_part(self, data: bytes, start: int, end: int) -> None:
        if self._name == FILE:
            self._file.append(data[start:end])
        elif len(self._part) + end - start > MAX_FIELD_BYTES:
            raise invalid(f"The form's field {shorten(self._name)!r} has more than {MAX_FIELD_BYTES} bytes.")
        else:
            self._part += data[start:end]

    def _end_part(self) -> None:
        if self._name != FILE:
            self.fields[self._name] = self._part.decode("utf-8", "replace")
            if len(self.fields) > MAX_FIELDS:
                raise invalid(f"The form has more than {MAX_FIELDS} fields.")

    def _end(self) -> None:
        self._has_ended = True


def _malformed(error: FormParserError) -> ApiError:
    return invalid(f"The form can't be read: {shorten(str(error))}")
