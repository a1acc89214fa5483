"""The collectors of tcgen05.mma: operands that the matrix unit keeps from one instruction to the next (PTX ISA 9.7.17, collector buffer).

Contract: `Collectors` of a CTA follows what its instructions, in the order of their issue, say about A and B. The
product itself is always of what memory holds. Checked: an instruction that uses a collector reads the operand that
filled it; B is kept by sm_107 alone, by instructions with 128 rows a CTA (documentation of cuDNN's kernels: others are
illegal). Not checked: memory that changes between, the four buffers of `.ws`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

__all__ = ["Collectors", "collector_words"]

KEPT = ("fill", "use")


def collector_words(modifiers: tuple[str, ...]) -> dict[str, str]:
    """What an instruction says about the collectors of "a" and "b": "discard", "fill", "use" or "lastuse"."""
    parts = [word.split("::") for word in modifiers if word.startswith("collector::")]
    return {name: word for _, name, word in parts if name in ("a", "b")}


class Collectors:
    def __init__(self) -> None:
        self.held: dict[str, Hashable] = {"a": None, "b": None}

    def issue(
        self, words: Mapping[str, str], operands: Mapping[str, Hashable], rows: int, shifts: bool, target: str
    ) -> list[str]:
        """What is wrong with an instruction that says `words` and multiplies `operands`, with `rows` of A in a CTA."""
        problems = []
        for name, word in ((name, words.get(name, "discard")) for name in self.held):
            if word in ("use", "lastuse") and self.held[name] != operands[name]:
                holds = "nothing" if self.held[name] is None else "another operand"
                problems.append(f"{word} of {name.upper()}, of which the collector holds {holds}")
            self.held[name] = operands[name] if word in KEPT else None
        if "b" in words and not target.startswith("sm_107"):
            problems.append(f"B is not kept on {target}")
        elif words.get("b", "discard") != "discard" and rows != 128:
            problems.append(f"B is kept with 128 rows a CTA, not {rows}")
        if shifts and words.get("a") in KEPT:
            problems.append(f"{words['a']} of A by an instruction that shifts it")
        return problems
