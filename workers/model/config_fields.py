"""Typed reading of a `config.json` that is not trusted."""

from __future__ import annotations

from collections.abc import Mapping

from workers.model.errors import CheckpointError


class ConfigFields:
    """Checked access to the keys of a config. A key that is null counts as absent, as in transformers.

    Every getter raises CheckpointError naming the key, the value and what is allowed. A getter without a
    default requires the key.
    """

    def __init__(self, values: Mapping[str, object], where: str = "config.json") -> None:
        self._values = values
        self._where = where

    def has(self, key: str) -> bool:
        return self._values.get(key) is not None

    def mentions(self, key: str) -> bool:
        """Whether the key is written down at all, be it with null."""
        return key in self._values

    def without(self, *keys: str) -> ConfigFields:
        """As if these keys were not there."""
        kept = {key: value for key, value in self._values.items() if key not in keys}
        return ConfigFields(kept, self._where)

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._wrong(key, value, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, default: float | None = None, *, low: float, high: float) -> float:
        value = self._value(key, default)
        # Comparisons alone: they refuse NaN, and are exact for an int too large for a float.
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self._wrong(key, value, f"a number from {low:g} to {high:g}")
        return float(value)

    def optional_integer(self, key: str, default: int | None, *, low: int = 1, high: int) -> int | None:
        """As `integer`; the default stands for a key that is not there at all, and null means None."""
        if self.has(key):
            return self.integer(key, low=low, high=high)
        return None if self.mentions(key) else default

    def optional_number(self, key: str, default: float | None, *, low: float, high: float) -> float | None:
        """As `number`, with defaults as in `optional_integer`."""
        if self.has(key):
            return self.number(key, low=low, high=high)
        return None if self.mentions(key) else default

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def texts(self, key: str, count: int) -> list[str]:
        """A list of exactly `count` strings."""
        value = self._value(key, None)
        if (
            not isinstance(value, list)
            or len(value) != count
            or not all(isinstance(entry, str) for entry in value)
        ):
            raise self._wrong(key, value, f"a list of {count} strings")
        return value

    def integers(self, key: str, *, low: int, high: int) -> list[int]:
        """An integer or a list of integers, as a list."""
        value = self._value(key, None)
        found: list[int] = []
        for entry in value if isinstance(value, list) else [value]:
            if isinstance(entry, bool) or not isinstance(entry, int) or not low <= entry <= high:
                raise self._wrong(key, value, f"integers from {low} to {high}")
            found.append(entry)
        return found

    def numbers(self, key: str, count: int, *, low: float, high: float) -> tuple[float, ...]:
        """A list of exactly `count` numbers."""
        value = self._value(key, None)
        if (
            not isinstance(value, list)
            or len(value) != count
            or not all(
                isinstance(n, int | float) and not isinstance(n, bool) and low <= n <= high for n in value
            )
        ):
            raise self._wrong(key, value, f"a list of {count} numbers from {low:g} to {high:g}")
        return tuple(map(float, value))

    def section(self, key: str) -> dict[str, object]:
        """A nested object; empty when absent."""
        value = self._values.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self._wrong(key, value, "an object")
        return dict(value)

    def _value(self, key: str, default: object) -> object:
        value = self._values.get(key)
        if value is not None:
            return value
        if default is None:
            raise CheckpointError(f"{self._where} lacks {key}")
        return default

    def _wrong(self, key: str, value: object, allowed: str) -> CheckpointError:
        shown = repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return CheckpointError(f"{self._where}: {key} must be {allowed}; got {shown}")
