"""What the files must hold when some of the matrices are stored in few bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from workers.model.formats.layouts import Entries, Layout, Part
from workers.model.safetensors_header import TensorEntry

FLOATS = ("F32", "F16", "BF16")  # that plain weights may be stored in
_WEIGHT = ".weight"


def stem_in(name: str, layout: Layout | None, entries: Entries) -> str | None:
    """The matrix that a plain checkpoint has as `name`, if the files hold it in the form of the layout."""
    stem = name.removesuffix(_WEIGHT)
    return stem if layout is not None and stem != name and layout.has(stem, entries) else None


def expected_parts(
    wanted: Mapping[str, tuple[int, ...]],
    layout: Layout | None,
    entries: Entries,
    is_inputs_first: Callable[[str], bool],
) -> dict[str, Part]:
    """The tensors that stand for those of a plain checkpoint; is_inputs_first: which lie transposed."""
    found: dict[str, Part] = {}
    for name, shape in wanted.items():
        stem = stem_in(name, layout, entries) if len(shape) == 2 else None
        if layout is None or stem is None:
            found[name] = Part((shape,), FLOATS)
        else:
            inputs, outputs = shape if is_inputs_first(name) else shape[::-1]
            found.update(layout.parts(stem, outputs, inputs, entries))
    return found


def problem_with(name: str, part: Part, entry: TensorEntry | None) -> str | None:
    """How a tensor differs from what is expected of it."""
    if entry is None:
        return f"missing {name} {list(part.shapes[0])}" if part.is_needed else None
    if entry.shape not in part.shapes:
        allowed = " or ".join(str(list(shape)) for shape in part.shapes)
        return f"{name} has shape {list(entry.shape)}, the config needs {allowed}"
    if entry.dtype not in part.dtypes:
        return f"{name} has dtype {entry.dtype}, supported are {', '.join(part.dtypes)}"
    return None
