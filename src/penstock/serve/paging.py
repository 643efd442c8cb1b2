"""Query parameters, and a page of a list in OpenAI's form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError
from starlette.requests import Request as HttpRequest
from typing_extensions import TypedDict

from penstock.serve.errors import invalid

_Listed = TypeVar("_Listed", bound=Mapping[str, Any])
_Value = TypeVar("_Value")


class Page(TypedDict, Generic[_Listed]):
    object: Literal["list"]
    data: list[_Listed]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Parameter(Generic[_Value]):
    """An optional query parameter. Requests are read, and the OpenAPI document is written, by the same type."""

    def __init__(self, name: str, kind: Any, default: _Value, wanted: str) -> None:
        """`wanted`: what a value must be, in the words of the error."""
        self.name, self._default, self._wanted = name, default, wanted
        self._adapter: TypeAdapter[_Value] = TypeAdapter(kind)

    def schema(self) -> dict[str, Any]:
        return self._adapter.json_schema() | {"default": self._default}

    def read(self, http: HttpRequest) -> _Value:
        """Return the value, or the default without one. Raises 400."""
        text = http.query_params.get(self.name)
        if text is None:
            return self._default
        try:
            return self._adapter.validate_strings(text)
        except ValidationError:
            raise invalid(f"'{self.name}' must be {self._wanted}.", self.name) from None


def count(name: str, default: int, low: int, high: int) -> Parameter[int]:
    """Return a parameter that is a number from `low` to `high`."""
    digits = BeforeValidator(lambda text: text if text.isdecimal() else None)  # pydantic also takes `1_0` and ` 1.0`
    return Parameter(name, Annotated[int, Field(ge=low, le=high), digits], default, f"an integer from {low} to {high}")


LIMIT = count("limit", 20, 1, 100)
"""Most items of a page."""
ORDER = Parameter("order", Literal["asc", "desc"], "desc", "'asc' or 'desc'")


def listed(data: list[_Listed], limit: int) -> Page[_Listed]:
    """Return a page of a list. `data` has one more than the page if others follow."""
    page = data[:limit]
    ids = [str(one["id"]) for one in page]
    return {
        "object": "list",
        "data": page,
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
        "has_more": len(data) > limit,
    }
