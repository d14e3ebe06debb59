"""``help()`` of a public name says all that a caller needs: an editor shows no comments."""

import dataclasses
import inspect
import re

import pytest

import stepjepa

CLASSES = [name for name in stepjepa.__all__ if inspect.isclass(getattr(stepjepa, name))]


@pytest.mark.parametrize("name", CLASSES)
def test_every_field_of_a_public_class_is_described(name: str) -> None:
    """Shapes, units and meanings of fields stood in comments, which ``help`` does not show."""
    public = getattr(stepjepa, name)
    is_dataclass = dataclasses.is_dataclass(public)
    fields = [field.name for field in dataclasses.fields(public)] if is_dataclass else getattr(public, "_fields", ())
    described = re.findall(r"^    ([\w, ]+): \S", inspect.getdoc(public) or "", re.MULTILINE)
    names = {each.strip() for line in described for each in line.split(",")}
    lacking = [field for field in fields if field not in names and f"``{field}``" not in (public.__doc__ or "")]
    assert lacking == []
