"""The page needs no other file, escapes its texts, and follows the reader's colour scheme."""

from html.parser import HTMLParser

import pytest

from bench.isolation.arms import BULK_ALONE, FIRST_COME, OURS, OURS_ALONE, ArmBuilder, read_shipped_tiers
from bench.isolation.controls import Evidence
from bench.isolation.experiments import EXPERIMENTS, ExperimentName
from bench.isolation.goals import judge
from bench.isolation.results.plots import draw_experiment
from bench.isolation.results.record import isolation_record, warnings_of
from bench.isolation.results.result import Result, as_dict
from bench.isolation.rounds import Rounds
from bench.isolation.summary import summarize_arms
from bench.isolation.tuning import Goodput, Probe
from loadtest.client.runner import Timing
from loadtest.reporting.record import Card, Drawing, Fold, Provenance, Record, Row, Section, Table
from loadtest.reporting.writers import render_page, render_text
from loadtest.traffic.scenario import Targets
from tests.bench.isolation.builders import DURATION_S, SCENARIO, answered, make_part

VOID = {"meta", "br", "img", "link", "use", "path", "image", "line"}
PROVENANCE = Provenance("python -m bench isolation <x>", "2026-01-02", "h", "m", 1)
SLOS = {"chat": Targets(ttft_ms=100, itl_ms=50)}


class Elements(HTMLParser):
    """Counts opened and closed elements, and remembers what is referred to."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def checked(html: str) -> Elements:
    elements = Elements()
    elements.feed(html)
    assert elements.open == []
    return elements


def make_result(experiment: ExperimentName = "isolation", *, clients_given: bool = False) -> Result:
    builder, rounds = ArmBuilder(read_shipped_tiers(), Targets()), Rounds()
    knobs = 'tidegate_controller_batch_size{tier="bulk"} 8\ntidegate_step_seconds_sum 1'
    for name, ttft_s in ((OURS_ALONE, 0.04), (BULK_ALONE, 0.0), (FIRST_COME, 0.3), (OURS, 0.05)):
        chat = [answered("chat", 0.4 * i, ttft_s, (0.01,)) for i in range(20)]
        rounds.add(make_part(builder.build(name), chat, [answered("backlog", 0.0, 3.0, tokens=80)], [knobs, knobs]))
    arms = summarize_arms(rounds, SCENARIO, SLOS)
    goals, controls = judge(Evidence(experiment, arms, solo_load=None if clients_given else 0.5))
    return Result(
        EXPERIMENTS[experiment],
        SCENARIO,
        0.125,
        0.5,
        3.0,
        Timing(DURATION_S, 1),
        SLOS,
        rounds,
        arms,
        goals,
        controls,
        goodput=None if clients_given else Goodput(3.0, (Probe(3.0, 40, 0), Probe(4.0, 40, 2, was_cut=True)), 4.0),
        explained={"workers": []},
        warnings=["something <odd>"],
    )


@pytest.fixture(scope="module")
def html() -> str:
    """A page with a change of load, which adds a drawing to those of isolation. Drawn once."""
    result = make_result("overload")
    return render_page(isolation_record(result, PROVENANCE, draw_experiment(result)))


def test_an_experiments_page_needs_nothing_beside_it(html: str) -> None:
    elements = checked(html)
    assert all(r.startswith(("#", "data:")) for r in elements.references)
    assert "@import" not in html and "url(http" not in html
    assert "prefers-color-scheme: dark" in html and "currentColor" in html and "#010203" not in html
    for said in ("0.125 × the scenario", "something &lt;odd&gt;"):
        assert said in html
    assert "4×: 2 or more of 40 late" in html and "0.5 of the solo goodput, then 3 times that" in html


def test_a_load_that_was_given_is_no_share_of_anything() -> None:
    result = make_result(clients_given=True)
    text = render_text(isolation_record(result, PROVENANCE, {}))
    assert "fails, as it must" in text
    assert "load: 0.5 × 3 clients, as given (--clients)" in text and "0.5 of the solo goodput" not in text
    assert "the load's share of the solo goodput was not measured" in text
    assert as_dict(result)["clients_given"] is True and result.solo_load is None
    assert any("no share of it is known" in warning for warning in warnings_of(result))
    assert not any("no share of it is known" in warning for warning in warnings_of(make_result()))


def test_everything_but_drawings_is_escaped() -> None:
    section = Section(
        "<b>",
        Table(("<u>",), (Row(("<td>",)),)),
        ("<note>",),
        (("<f>", "<v>"),),
        "<i>",
        (Drawing("<svg></svg>", "<h>", "<c>"),),
        (Fold("<t>", "<x>"),),
    )
    html = render_page(Record("t", [section], {}, PROVENANCE, ["<w>"], [Card("<1>", "<2>")]))
    checked(html)
    for text in ("<note>", "<i>", "<u>", "<f>", "<v>", "<x>", "<w>", "<1>"):
        assert text not in html.replace("<b>&lt;1&gt;", "")
    assert "<svg></svg>" in html
