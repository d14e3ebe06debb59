"""Attributes by the names that other libraries give them: their error says what to use instead."""

from typing import TYPE_CHECKING, Any, ClassVar


class OtherNames:
    """Answers an attribute that objects of other libraries have with an ``AttributeError`` that names ours."""

    elsewhere: ClassVar[dict[str, str]] = {}
    """Name in another library -> what to use instead."""

    if not TYPE_CHECKING:  # for a type checker an attribute with another name does not exist

        def __getattr__(self, name: str) -> Any:
            if remedy := type(self).elsewhere.get(name):
                raise AttributeError(f"{type(self).__name__} has no attribute '{name}'; {remedy}")
            # Python's own error; that of a property, if it is one that raised an AttributeError.
            return object.__getattribute__(self, name)
