"""Results of the workshop on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from iota.incentives_replay import Replayed
from subnet.incentives.outcome import Band
from subnet.incentives.summary import NOT_SIMULATED, Comparison, Kind, Result

WIDE = 170


def print_result(result: Result) -> None:
    print(
        f"{result.machines} machines, {result.days:g} days ({result.tempos} tempos), seeds "
        f"{result.seeds[0]} to {result.seeds[-1]}, policy {result.policy[:12]}"
    )
    _print_without_effect(result.without_effect)
    print("USD per machine and day of membership; with the half width of a 90 % band over the seeds")
    columns = ("group", "n", "income", "cost", "profit", "against honesty", "if registering were free", "pays below",
               "found out after h", "of liars", "registered", "convicted")  # fmt: skip
    print_table(columns, map(_row, result.kinds))
    print()
    print(f"burned {percent(result.burned_share)}, Gini of incomes {number(result.gini)}, ", end="")
    print(f"away for the price {percent(result.churn)} of the time ({number(result.departures)} departures)")
    copying = "" if result.copying_dividends is None else f", with one that copies {number(result.copying_dividends)}"
    print(f"dividends a day per 1,000 staked: with a validator that counts {number(result.honest_dividends)}{copying}")
    print(verdict(result))


def _print_without_effect(names: Sequence[str]) -> None:
    if names:
        print(f"without effect in a simulation: {', '.join(names)}")


def verdict(result: Result) -> str:
    """Whether honesty pays more than every attack, in a line."""
    attacks = [kind for kind in result.kinds if kind.is_attack and kind.gain is not None]
    if not attacks:
        return "no attack of this scenario has honest machines of its hardware beside it"
    paying = [kind.name for kind in attacks if kind.gain is not None and kind.gain.mean >= 0]
    unsure = [kind.name for kind in attacks if kind.gain is not None and kind.gain.mean < 0 <= kind.gain.high]
    if paying:
        return f"NOT below honesty: {', '.join(paying)}"
    doubt = f" (within the band it could be more: {', '.join(unsure)})" if unsure else ""
    return f"every attack earns less than honesty after its cost{doubt}"


def _row(kind: Kind) -> Sequence[str]:
    return (
        kind.name,
        str(kind.machines),
        number(kind.income),
        number(kind.cost),
        number(kind.profit),
        number(kind.gain),
        number(kind.gain_without_registrations) if kind.is_attack else "",
        pays_below(kind.break_even_registration_usd),
        number(kind.found_out_h),
        percent(kind.found_out_share),
        f"{kind.registrations.mean:.1f}",
        f"{kind.convictions.mean:.1f}",
    )


def pays_below(price: Band | None) -> str:
    """The price of a registration below which an attack pays."""
    if price is None:
        return ""
    return f"{price.mean:.2f} USD" if price.mean > 0 else "never"


def print_comparison(found: Comparison) -> None:
    for name, (before, after) in found.changed.items():
        print(f"{name}: {before} in A, {after} in B")
    if not found.changed:
        print("A and B are the same policy")
    _print_without_effect([name for name in found.changed if name in NOT_SIMULATED])
    print("USD per machine and day of membership; changes of the same seed, with the half width of a 90 % band")
    columns = ("group", "income A", "income B", "change", "B / A", "profit A", "profit B", "against honesty A", "B",
               "found out after h A", "B")  # fmt: skip
    print_table(
        columns,
        (
            (
                kind.name,
                number(kind.income_a),
                number(kind.income_b),
                number(kind.income_change),
                percent(kind.income_ratio),
                number(kind.profit_a),
                number(kind.profit_b),
                number(kind.gain_a),
                number(kind.gain_b),
                number(kind.found_out_h_a),
                number(kind.found_out_h_b),
            )
            for kind in found.kinds
        ),
    )
    print()
    for what, a, b, change in (
        ("burned", found.a.burned_share, found.b.burned_share, found.burned_share_change),
        ("Gini of incomes", found.a.gini, found.b.gini, found.gini_change),
        ("away for the price", found.a.churn, found.b.churn, found.churn_change),
    ):
        print(f"{what}: {number(a)} in A, {number(b)} in B, change {number(change)}")
    print(f"A: {verdict(found.a)}\nB: {verdict(found.b)}")


def print_replayed(found: Replayed) -> None:
    print(
        f"run {found.run_id}: {found.num_records} records over {found.seconds:.0f} s, scores read {found.num_samples} times"
    )
    for name, (before, after) in found.changed.items():
        note = "  (decides what is journaled: a replay can't apply it)" if name in found.not_replayed else ""
        print(f"{name}: {before} in A, {after} in B{note}")
    if not found.changed:
        print("A and B are the same policy")
    columns = ("hotkey", "share A", "share B", "B / A", "last score A", "B", "reliability A", "B", "items", "")
    print_table(
        columns,
        (
            (
                one.hotkey,
                f"{one.share_a:.4f}",
                f"{one.share_b:.4f}",
                f"{100 * one.share_b / one.share_a:.1f} %" if one.share_a > 0 else "",
                f"{one.last_score_a:.4f}",
                f"{one.last_score_b:.4f}",
                f"{one.reliability_a:.4f}",
                f"{one.reliability_b:.4f}",
                str(one.sealed_items),
                one.convicted,
            )
            for one in found.earned
        ),
    )


def number(value: Band | None) -> str:
    if value is None:
        return ""
    half = (value.high - value.low) / 2
    digits = 0 if abs(value.mean) >= 1000 else 1 if abs(value.mean) >= 100 else 2 if abs(value.mean) >= 1 else 3
    return f"{value.mean:.{digits}f} ±{half:.{digits}f}" if half else f"{value.mean:.{digits}f}"


def percent(value: Band | None) -> str:
    if value is None:
        return ""
    half = 50 * (value.high - value.low)
    return f"{100 * value.mean:.1f} % ±{half:.1f}" if half else f"{100 * value.mean:.1f} %"


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, justify="left" if name in ("group", "hotkey", "") else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console(soft_wrap=False)
    if not console.is_terminal:
        console = Console(width=WIDE)
    console.print(table)
