"""The report's section on success: success rates of evaluations, overall and by task."""

from __future__ import annotations

from html import escape

from unidle.formatting import percent, score, short_number
from unidle.report.history import History, number
from unidle.report.page.cards import section, series
from unidle.report.page.svg import line_chart


def success_section(history: History) -> str:
    """Return success over steps and a table of tasks; empty if the environments report neither."""
    final, tasks = history.final_evaluation, history.tasks
    cards = []
    if history.success is not None:
        lines = [
            series("training, last 100 episodes", history.iterations, "rollout/success"),
            series("evaluation", history.evaluations, "eval/success"),
        ]
        cards.append(
            line_chart(
                "Success over steps",
                lines,
                "environment steps",
                "share of episodes",
                from_zero=True,
                as_percent=True,
            )
        )
    if tasks and final is not None:
        cards.append(_table(history, tasks))
    remark = "an episode counts if it succeeds at any step"
    return section("Success", remark if history.success is not None else "", "two", cards) if cards else ""


def _table(history: History, tasks: list[str]) -> str:
    """Return one row per task: success and return of the last evaluation, and the best success so far."""
    final = history.final_evaluation
    assert final is not None
    rows = []
    for task in tasks:
        seen = [value for r in history.evaluations if (value := number(r, f"eval/success/{task}")) is not None]
        now, total = number(final, f"eval/success/{task}"), number(final, f"eval/return/{task}")
        cells = (
            "–" if now is None else percent(now),
            "–" if not seen else percent(max(seen)),
            "–" if total is None else score(total),
        )
        rows.append(
            f'<tr><th scope="row">{escape(task)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        )
    heads = "".join(f'<th scope="col">{head}</th>' for head in ("task", "success", "best success", "return"))
    where = f"Tasks at step {short_number(final['step'])}"
    return f'<h3>{escape(where)}</h3><table class="tasks"><tr>{heads}</tr>{"".join(rows)}</table>'
