"""The report's section on plasticity: the networks' ability to keep learning, at each evaluation."""

from __future__ import annotations

from unidle.algos.dormancy import DORMANT, MIN_UPDATES, TOO_DORMANT, dormancy_warning
from unidle.report.history import History, number
from unidle.report.page.cards import SMALL, section, series
from unidle.report.page.svg import Reference, line_chart

_NETWORKS = ("critic", "actor")
_NORMS = {"weight_norm": "Weight norm", "grad_norm": "Gradient norm"}


def plasticity_section(history: History) -> str:
    """Return charts of all plasticity metrics; empty if there are none."""
    records = [r for r in history.evaluations if number(r, DORMANT) is not None]
    if not records:
        return ""

    def chart(title: str, keys: dict[str, str], meaning: str, limit: float | None = None) -> str:
        """Draw one chart with a line per name."""
        lines = [series(name, records, key) for name, key in keys.items()]
        reference = None if limit is None else Reference(limit, "limit")
        return line_chart(
            title,
            lines,
            "environment steps",
            meaning,
            size=SMALL,
            from_zero=True,
            as_percent=limit is not None,
            reference=reference,
        )

    def both_networks(measure: str) -> dict[str, str]:
        return {network: f"plasticity/{network}/{measure}" for network in _NETWORKS}

    charts = [
        chart("Dormant neurons", both_networks("dormant"), "share of hidden neurons", TOO_DORMANT),
        chart("Feature rank", both_networks("rank"), "directions for 99 % of the variance"),
    ]
    for norm, title in _NORMS.items():
        for network in _NETWORKS:
            prefix = f"plasticity/{network}/{norm}/"
            layers = sorted(key.removeprefix(prefix) for key in records[-1] if key.startswith(prefix))
            keys = {f"layer {layer}": prefix + layer for layer in layers}
            if keys:
                charts.append(chart(f"{title}, {network}", keys, "Euclidean norm"))
    last = number(records[-1], DORMANT) or 0.0
    updates = next((r["train/n_updates"] for r in reversed(history.iterations) if "train/n_updates" in r), MIN_UPDATES)
    note = dormancy_warning(last) if last > TOO_DORMANT and updates >= MIN_UPDATES else ""
    return section("Plasticity", "actor and first critic, at evaluations", "three", charts, note)
