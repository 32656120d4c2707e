"""The reward model `thumbs`: its fit against the objective by definition, what it refuses, whom it does not hear."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from benchmarks._thumbs_world import People, runs, thumbed
from headrace_scorer.learned import columns, crowd
from headrace_scorer.learned.models import FitRequirements, Thumb, ThumbedRun
from headrace_scorer.learned.thumbs import fit, read

DEMANDS = FitRequirements(thumbs_min=20)


def spoken(seed: int = 1, count: int = 400, **people: object) -> list[ThumbedRun]:
    return thumbed(seed, runs(seed, count), People(**{"share": 1.0, **people}))[0]  # type: ignore[arg-type]


def plain(count: int, *raters: str) -> list[ThumbedRun]:
    """Every other run is good and looks so; each rater says so of all."""
    made = []
    for number in range(count):
        thumbs = tuple(Thumb(rater, float(number % 2)) for rater in raters)
        noise = random.Random(number).random() / 10
        made.append(ThumbedRun(f"t{number}", {"judge:help": 0.4 + 0.2 * (number % 2) + noise}, thumbs))
    return made


def test_the_fit_is_the_maximum_of_its_objective(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was said is a mixture over what is true; finite differences of that, written down anew."""
    taught = [replace(run, thumbs=(*run.thumbs, Thumb("second", 1.0 - (n % 3 == 0)))) for n, run in enumerate(spoken())]
    found, _ = columns.columns_of([run.features for run in taught], [])
    table = columns.table(found, [run.features for run in taught])
    thumbs, prior = crowd.thumbs_of(taught, 1.0), np.full(len(found), 0.1)
    monkeypatch.setattr(crowd, "_ROUNDS_MAX", 2000)  # to the end, however slowly it comes nearer
    made = crowd.fit(table, thumbs, prior, 2.0)
    right = dict(zip(thumbs.raters, made.right_A.tolist(), strict=True))

    def objective(weights: np.ndarray) -> float:
        total = -(0.1 * weights[0] ** 2 + 2.0 * float(((weights[1:] - prior) ** 2).sum())) / 2
        for row, run in zip(table, taught, strict=True):
            good = 1 / (1 + math.exp(-float(weights[0] + row @ weights[1:])))
            up, down = good, 1 - good
            for one in run.thumbs:
                up *= right[one.rater] if one.value else 1 - right[one.rater]
                down *= 1 - right[one.rater] if one.value else right[one.rater]
            total += math.log(up + down)
        return float(total)

    for at in range(len(made.weights_D)):
        step = np.zeros(len(made.weights_D))
        step[at] = 1e-4
        slope = (objective(made.weights_D + step) - objective(made.weights_D - step)) / 2e-4
        assert abs(slope) < 0.02, at


def test_it_comes_back_as_it_was_and_order_makes_no_difference() -> None:
    taught, others = spoken(count=200), [one.features for one in runs(2, 80)]
    made = fit(taught, others, DEMANDS)
    again = fit(taught[::-1], others[::-1], DEMANDS)
    assert made.fit_facts.silent is None
    assert again.to_json() == made.to_json()
    assert read(made.to_json()) == made
    assert read(made.to_json()).judge(others[0]) == made.judge(others[0])


def test_it_is_silent_with_few_thumbs_and_where_thumbs_say_nothing() -> None:
    assert "10 thumbs; scorer.learned.thumbs_min requires 20" in str(fit(plain(10, "a"), [], DEMANDS).fit_facts.silent)
    chance = random.Random(0)
    noise = [replace(one, thumbs=(Thumb("a", float(chance.random() < 0.5)),)) for one in plain(60, "a")]
    assert "chance" in str(fit(noise, [], DEMANDS).fit_facts.silent)
    assert fit(noise, [], DEMANDS).judge(noise[0].features) is None


def test_thumbs_that_are_swapped_are_noticed() -> None:
    """A reward of another source cannot be worth less the higher it is for everybody."""
    swapped = [replace(one, thumbs=(Thumb("a", 1 - one.thumbs[0].value),)) for one in plain(60, "a")]
    made = fit(swapped, [], DEMANDS)
    likely = made.judge({"judge:help": 0.65})
    assert likely is None or likely.value < 0.5, "it says what people say, and never the contrary of it"


def test_it_abstains_of_what_it_has_not_seen_enough_of() -> None:
    usual_runs = plain(60, "a")
    rare_runs = [replace(one, features={**one.features, "rare": 1.0}) for one in usual_runs[:2]]
    taught = [*rare_runs, *usual_runs[2:]]
    wide = fit(taught, [], replace(DEMANDS, width_max=1.0))
    usual, rare = wide.judge({"judge:help": 0.55}), wide.judge({"judge:help": 0.55, "rare": 1.0})
    assert usual is not None
    assert rare is not None
    assert _log_odds(rare.high) - _log_odds(rare.low) > _log_odds(usual.high) - _log_odds(usual.low)
    assert usual.high - usual.low > 0.05
    assert replace(wide, requirements=replace(DEMANDS, width_max=0.05)).judge({"judge:help": 0.55}) is None


def _log_odds(share: float) -> float:
    return math.log(share / (1 - share))


@pytest.mark.parametrize("of_others", [{}, {"function:leak": 0.5}])
def test_what_was_made_of_the_thumb_is_refused(of_others: dict[str, float]) -> None:
    taught = [replace(one, features={**one.features, "function:leak": one.thumbs[0].value}) for one in plain(60, "a")]
    others = [{**one.features, **of_others} for one in plain(80, "a")]
    made = fit(taught, others, DEMANDS)
    assert made.fit_facts.refused == ("function:leak",)
    assert all(column.name != "function:leak" for column in made.columns)


def lengthy(count: int, *, judged: bool = True) -> list[ThumbedRun]:
    """People like long runs, and a judge does as well: what it says beyond the length is noise."""
    draw = random.Random(5)
    made = []
    for number in range(count):
        turns, noise = draw.gauss(2, 1), draw.gauss(0, 1)
        features = {"run/turns": turns, **({"judge:help/warmth": turns + noise} if judged else {})}
        thumb = Thumb(f"u{number % 50}", float(turns + draw.gauss(0, 0.5) > 2))
        made.append(ThumbedRun(f"t{number}", features, (thumb,)))
    return made


def test_what_the_agent_controls_is_learned_and_not_paid() -> None:
    made = fit(lengthy(400), [], replace(DEMANDS, width_max=1.0))
    short, long = (made.judge({"judge:help/warmth": 2.0, "run/turns": turns}) for turns in (1.0, 3.0))
    assert short is not None
    assert long is not None
    assert long.value - short.value > 0.3, "what it believes"
    assert long.paid == short.paid
    all_paid = fit(lengthy(400), [], replace(DEMANDS, width_max=1.0, controlled=()))
    paid = all_paid.judge({"judge:help/warmth": 2.0, "run/turns": 3.0})
    assert paid is not None
    assert paid.paid == paid.value == long.value


def test_nothing_else_is_credited_for_what_the_agent_controls() -> None:
    """A judge that likes length would pay for it, where length is only hidden from the model."""

    def pays(*, hidden: bool) -> float:
        taught = [
            replace(one, features={k: v for k, v in one.features.items() if not (hidden and k == "run/turns")})
            for one in lengthy(400)
        ]
        made = fit(taught, [], replace(DEMANDS, width_max=1.0))
        low, high = made.judge({"judge:help/warmth": 1.0}), made.judge({"judge:help/warmth": 3.0})
        assert low is not None
        assert high is not None
        return high.paid - low.paid

    assert pays(hidden=False) < pays(hidden=True) / 2


def test_it_is_silent_where_the_agent_controls_all_that_it_sees() -> None:
    assert "controls" in str(fit(lengthy(100, judged=False), [], DEMANDS).fit_facts.silent)
    assert fit(lengthy(100, judged=False), [], replace(DEMANDS, controlled=())).fit_facts.silent is None


def test_who_contradicts_everybody_is_not_heard() -> None:
    taught = plain(120, "a", "b")
    poisoned = [
        replace(one, thumbs=(*one.thumbs, Thumb("x", 1 - one.thumbs[0].value))) if n % 2 else one
        for n, one in enumerate(taught)
    ]
    sound, made = fit(taught, [], DEMANDS), fit(poisoned, [], DEMANDS)
    assert made.fit_facts.unheard == ("x",)
    for score in (0.45, 0.65):
        one, other = sound.judge({"judge:help": score}), made.judge({"judge:help": score})
        assert one is not None
        assert other is not None
        assert abs(one.value - other.value) < 0.1


def test_nobody_with_a_name_weighs_more_than_his_share() -> None:
    taught = [replace(one, thumbs=(Thumb("busy" if n % 2 else f"u{n}", 1.0),)) for n, one in enumerate(plain(100, "a"))]
    thumbs = crowd.thumbs_of(taught, 0.1)
    weights = np.bincount(thumbs.rater_T, weights=thumbs.weight_T)
    assert weights[thumbs.raters.index("busy")] == pytest.approx(10.0)
    assert weights.sum() == pytest.approx(60.0)
    nameless = crowd.thumbs_of(plain(100, ""), 0.1)
    assert nameless.weight_T.sum() == 100.0, "people without a name are many"
