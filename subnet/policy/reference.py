"""docs/policy.md's table of values, made from the type: ``python -m subnet.policy.reference`` prints it."""

from __future__ import annotations

from subnet.policy.policy import SECTIONS, SubnetPolicy
from subnet.policy.text import toml_of
from subnet.policy.values import values_of

BEGIN, END = "<!-- values: made by python -m subnet.policy.reference -->", "<!-- end of values -->"


def reference() -> str:
    """Markdown: a table for each section."""
    default, lines = SubnetPolicy().values(), [BEGIN]
    for heading, section in SECTIONS.items():
        lines += ["", f"### `[{heading}]`", " ".join((section.__doc__ or "").split()), ""]
        lines += ["| value | unit | default | allowed | one live change | what and why |", "|---|---|---|---|---|---|"]
        for name, value in values_of(section).items():
            cells = (
                f"`{name}`",
                value.unit,
                toml_of(default[f"{heading}.{name}"]),
                value.allowed,
                value.pace,
                value.why,
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", END])


if __name__ == "__main__":
    print(reference())
