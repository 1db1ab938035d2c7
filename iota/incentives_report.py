"""The workshop's pages: one file of HTML with its style and pictures inside, for light and dark, desktop and phone."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from iota.incentives_charts import Row, income_chart, rows_chart
from iota.incentives_tables import number, pays_below, percent, verdict
from subnet.incentives.outcome import Band
from subnet.incentives.summary import HONEST, Comparison, Difference, Kind, Result

STYLE = """
:root{color-scheme:light dark;--ground:#fbfbfa;--card:#fff;--ink:#1c2024;--soft:#5d666f;--edge:#dfe3e6;--grid:#e9ecee;
--honest:#1f6fc4;--attack:#c8461f;--plain:#5d666f}
@media(prefers-color-scheme:dark){:root{--ground:#14171a;--card:#1b1f23;--ink:#e8eaec;--soft:#a0a9b1;--edge:#31373d;
--grid:#292e33;--honest:#66a9ee;--attack:#f0855f;--plain:#a0a9b1}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:960px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:1.6rem;line-height:1.2;margin:0 0 4px}h2{font-size:1.15rem;margin:40px 0 4px}
p{margin:4px 0 12px;max-width:70ch}.soft{color:var(--soft);font-size:.92rem}
.verdict{border-left:4px solid var(--honest);background:var(--card);padding:10px 14px;margin:16px 0;font-weight:600}
.verdict.bad{border-color:var(--attack)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin:16px 0}
.tiles div{background:var(--card);border:1px solid var(--edge);border-radius:8px;padding:10px 12px}
.tiles b{display:block;font-size:1.25rem;font-variant-numeric:tabular-nums}.tiles span{color:var(--soft);font-size:.85rem}
.panel{background:var(--card);border:1px solid var(--edge);border-radius:8px;padding:12px}
.small{display:grid;grid-template-columns:repeat(auto-fill,minmax(210px,1fr));gap:10px}
figure{margin:0;background:var(--card);border:1px solid var(--edge);border-radius:8px;padding:8px 8px 2px}
figcaption{font-weight:600;font-size:.92rem}
svg{display:block;width:100%;height:auto}svg.narrow{display:none}
svg text{font-family:inherit;fill:var(--ink)}svg .tick{fill:var(--soft);font-size:11px}svg .label,svg .value{font-size:13px}
svg .value{font-variant-numeric:tabular-nums}
svg .grid{stroke:var(--grid)}svg .axis{stroke:var(--soft)}svg .band{stroke:var(--ink);stroke-width:1.4;opacity:.75}
svg .bar{opacity:.82}svg .honest{fill:var(--honest);stroke:none}svg .attack{fill:var(--attack)}svg .plain{fill:var(--plain)}
svg .area{opacity:.2}svg .line{fill:none;stroke-width:2}svg .line.honest{stroke:var(--honest)}svg .line.attack{stroke:var(--attack)}
svg .cost{fill:none;stroke:var(--ink);stroke-dasharray:3 4;opacity:.6}svg .reference{fill:none;stroke:var(--soft);stroke-width:1.5}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.88rem;font-variant-numeric:tabular-nums;width:100%}
th,td{padding:5px 9px;text-align:right;white-space:nowrap;border-bottom:1px solid var(--edge)}
th:first-child,td:first-child{text-align:left;position:sticky;left:0;background:var(--card)}
th{color:var(--soft);font-weight:600}details{margin-top:28px}summary{cursor:pointer;font-weight:600}
.key{display:inline-block;width:22px;border-top:2px solid;vertical-align:middle;margin:0 4px 0 8px}
.key.dash{border-top-style:dashed;opacity:.6}.key.grey{border-color:var(--soft)}
@media(max-width:620px){main{padding:18px 12px 40px}svg.wide{display:none}svg.narrow{display:block}
.small{grid-template-columns:1fr 1fr;gap:8px}.panel{padding:8px 4px}h1{font-size:1.35rem}}
"""


def page_of_result(result: Result) -> str:
    attacks = [kind for kind in result.kinds if kind.is_attack]
    body = [
        "<h1>What this policy pays for</h1>",
        f'<p class="soft">{_setting(result)}</p>',
        _verdict(result),
        _tiles(result),
        "<h2>Income over time</h2>",
        '<p class="soft">USD per machine and day, with a 90 % band. <span class="key dash"></span>its power or rent '
        '<span class="key grey"></span>honest machines of the same hardware</p>',
        f'<div class="small">{"".join(income_chart(kind, _like(kind, result.kinds)) for kind in result.kinds)}</div>',
        "<h2>Profit beside honesty's</h2>",
        '<p class="soft">Profit per machine and day of membership, less what honest machines of the same hardware make. Left of '
        "zero honesty pays more. Beyond 1 USD the axis is logarithmic.</p>",
        _panel(_gains(result.kinds, free=False), "profit beyond honesty's", "USD a day", bend=1.0),
    ]
    if any(kind.break_even_registration_usd is not None for kind in attacks):
        body += [
            "<h2>The same if registering cost nothing</h2>",
            '<p class="soft">What an attack would gain without the price of its hotkeys. Right of zero it is this price alone that '
            "keeps it from paying; the table says how much is needed.</p>",
            _panel(_gains(attacks, free=True), "profit beyond honesty's without registrations", "USD a day", bend=None),
        ]
    body += [
        "<h2>How soon lies are found out</h2>",
        '<p class="soft">Hours from a hotkey\'s first lie until a third party has confirmed it.</p>',
        _panel(
            [
                Row(kind.name, kind.found_out_h, f"{number(kind.found_out_h)} h", "attack")
                for kind in attacks
                if kind.found_out_h is not None
            ],
            "hours until found out",
            "hours",
            bend=None,
        ),
        "<h2>Who is paid</h2>",
        '<p class="soft">Share of all that miners are paid, by group.</p>',
        _panel(
            [Row(f"{k.name} ({k.machines})", _percent(k.share), percent(k.share), _tone(k)) for k in result.kinds],
            "share of pay",
            "%",
            bend=None,
        ),
        "<h2>All numbers</h2>",
        '<p class="soft">USD per machine and day of membership; registrations, convictions, faults and days per machine.</p>',
        _result_table(result.kinds),
        _policy(result),
    ]
    return _page("What this policy pays for", body)


def page_of_comparison(found: Comparison) -> str:
    changed = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(str(a))}</td><td>{escape(str(b))}</td></tr>"
        for name, (a, b) in found.changed.items()
    )
    body = [
        "<h1>Two policies, the same worlds</h1>",
        f'<p class="soft">{_setting(found.a)}</p>',
        '<div class="panel scroll"><table><tr><th>value</th><th>A</th><th>B</th></tr>'
        f"{changed or '<tr><td>no difference</td><td></td><td></td></tr>'}</table></div>",
        _verdict(found.a, "A: "),
        _verdict(found.b, "B: "),
        "<h2>What B changes for each group</h2>",
        '<p class="soft">Income under B, less that under A, as a share of that under A: the same seeds, so the bands are those of '
        "the change itself.</p>",
        _panel(
            [_ratio_row(kind) for kind in found.kinds if kind.income_ratio is not None],
            "change of income",
            "%",
            bend=None,
        ),
        "<h2>Profit beside honesty's, under B</h2>",
        '<p class="soft">Per machine and day of membership; left of zero honesty pays more. Beyond 1 USD the axis is '
        "logarithmic.</p>",
        _panel(_gains(found.b.kinds, free=False), "profit beyond honesty's under B", "USD a day", bend=1.0),
        "<h2>All numbers</h2>",
        '<p class="soft">USD per machine and day of membership.</p>',
        _comparison_table(found),
        _policy(found.b),
    ]
    return _page("Two policies, the same worlds", body)


# --- parts ---------------------------------------------------------------------------------------------------------


def _page(title: str, body: Sequence[str]) -> str:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>{''.join(body)}</main></body></html>\n"
    )


def _setting(result: Result) -> str:
    about = f"{escape(result.comment)}. " if result.comment else ""
    return (
        f"{about}{result.machines:,} machines, {result.days:g} days, seeds {result.seeds[0]} to {result.seeds[-1]}, "
        f"policy {result.policy[:12]}. Bands are of 90 % over the seeds."
    )


def _verdict(result: Result, before: str = "") -> str:
    said = verdict(result)
    bad = " bad" if said.startswith("NOT") else ""
    return f'<div class="verdict{bad}">{escape(before + said[:1].upper() + said[1:])}</div>'


def _tiles(result: Result) -> str:
    copying = result.copying_dividends
    tiles = [
        (percent(result.burned_share), "of miners' pay burned"),
        (number(result.gini), "Gini of machines' incomes"),
        (percent(result.churn), "of machine-hours away for the price"),
        (number(result.honest_dividends), "USD a day per 1,000 staked with a validator that counts"),
    ]
    if copying is not None:
        tiles.append((number(copying), "the same with one that copies weights"))
    return f'<div class="tiles">{"".join(f"<div><b>{v}</b><span>{escape(t)}</span></div>" for v, t in tiles)}</div>'


def _panel(rows: Sequence[Row], what: str, unit: str, *, bend: float | None) -> str:
    if not rows:
        return '<p class="soft">Nothing to show.</p>'
    return f'<div class="panel">{rows_chart(rows, what, unit=unit, bend=bend)}</div>'


def _percent(share: Band) -> Band:
    return Band(100.0 * share.mean, 100.0 * share.low, 100.0 * share.high)


def _tone(kind: Kind | Difference) -> str:
    return "attack" if kind.is_attack else "honest"


def _like(kind: Kind, kinds: Sequence[Kind]) -> Kind | None:
    """An honest group of the same hardware."""
    return next((o for o in kinds if (o.behaviour, o.hardware) == (HONEST, kind.hardware) and o is not kind), None)


def _gains(kinds: Sequence[Kind], *, free: bool) -> list[Row]:
    found: list[Row] = []
    for kind in kinds:
        gain = kind.gain_without_registrations if free else kind.gain
        if gain is not None:
            found.append(Row(kind.name, gain, number(gain), _tone(kind)))
    return sorted(found, key=lambda row: row.value.mean)


def _ratio_row(kind: Difference) -> Row:
    ratio = kind.income_ratio
    assert ratio is not None
    change = Band(*(100.0 * (value - 1.0) for value in (ratio.mean, ratio.low, ratio.high)))
    return Row(kind.name, change, f"{change.mean:+.1f} % ±{(change.high - change.low) / 2:.1f}", _tone(kind))


def _result_table(kinds: Sequence[Kind]) -> str:
    heads = ("group", "machines", "income", "cost", "profit", "against honesty", "pays if registering costs less than",
             "found out after h", "of liars", "registrations", "convictions", "faults", "days a member")  # fmt: skip
    rows = [
        (
            kind.name,
            str(kind.machines),
            number(kind.income),
            number(kind.cost),
            number(kind.profit),
            number(kind.gain),
            pays_below(kind.break_even_registration_usd),
            number(kind.found_out_h),
            percent(kind.found_out_share),
            number(kind.registrations),
            number(kind.convictions),
            number(kind.faults),
            number(kind.member_days),
        )
        for kind in kinds
    ]
    return _table(heads, rows)


def _comparison_table(found: Comparison) -> str:
    heads = ("group", "income A", "income B", "change", "B / A", "profit A", "profit B", "against honesty A", "B",
             "found out after h A", "B")  # fmt: skip
    rows = [
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
    ]
    return _table(heads, rows)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="panel scroll"><table><tr>{head}</tr>{body}</table></div>'


def _policy(result: Result) -> str:
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(str(value))}</td></tr>" for name, value in result.policy_values.items()
    )
    return f'<details><summary>The policy</summary><div class="scroll"><table>{rows}</table></div></details>'
