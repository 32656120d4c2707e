"""The reward model `thumbs`: its fit against the objective, its refusals, and the raters that it ignores."""

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


def thumbed_runs(seed: int = 1, count: int = 400, **people: object) -> list[ThumbedRun]:
    return thumbed(seed, runs(seed, count), People(**{"share": 1.0, **people}))[0]  # type: ignore[arg-type]


def plain(count: int, *raters: str) -> list[ThumbedRun]:
    """Return runs of which every second one is good and has better features. Each rater rates all of them correctly."""
    thumbed = []
    for number in range(count):
        thumbs = tuple(Thumb(rater, float(number % 2)) for rater in raters)
        noise = random.Random(number).random() / 10
        thumbed.append(ThumbedRun(f"t{number}", {"judge:help": 0.4 + 0.2 * (number % 2) + noise}, thumbs))
    return thumbed


def test_the_fit_is_the_maximum_of_its_objective(monkeypatch: pytest.MonkeyPatch) -> None:
    """The likelihood of a thumb is a mixture over the latent quality.

    Its finite differences are computed independently.
    """
    training_runs = [
        replace(run, thumbs=(*run.thumbs, Thumb("second", 1.0 - (n % 3 == 0)))) for n, run in enumerate(thumbed_runs())
    ]
    selected, _ = columns.columns_of([run.features for run in training_runs], [])
    table = columns.table(selected, [run.features for run in training_runs])
    thumbs, prior = crowd.thumbs_of(training_runs, 1.0), np.full(len(selected), 0.1)
    monkeypatch.setattr(crowd, "_ROUNDS_MAX", 2000)  # to the end, however slowly it comes nearer
    fitted = crowd.fit(table, thumbs, prior, 2.0)
    right = dict(zip(thumbs.raters, fitted.right_A.tolist(), strict=True))

    def objective(weights: np.ndarray) -> float:
        total = -(0.1 * weights[0] ** 2 + 2.0 * float(((weights[1:] - prior) ** 2).sum())) / 2
        for row, run in zip(table, training_runs, strict=True):
            good = 1 / (1 + math.exp(-float(weights[0] + row @ weights[1:])))
            up, down = good, 1 - good
            for thumb in run.thumbs:
                up *= right[thumb.rater] if thumb.value else 1 - right[thumb.rater]
                down *= 1 - right[thumb.rater] if thumb.value else right[thumb.rater]
            total += math.log(up + down)
        return float(total)

    for at in range(len(fitted.weights_D)):
        step = np.zeros(len(fitted.weights_D))
        step[at] = 1e-4
        slope = (objective(fitted.weights_D + step) - objective(fitted.weights_D - step)) / 2e-4
        assert abs(slope) < 0.02, at


def test_it_comes_back_as_it_was_and_order_makes_no_difference() -> None:
    training_runs, unrated = thumbed_runs(count=200), [run.features for run in runs(2, 80)]
    fitted = fit(training_runs, unrated, DEMANDS)
    again = fit(training_runs[::-1], unrated[::-1], DEMANDS)
    assert fitted.fit_facts.silent is None
    assert again.to_json() == fitted.to_json()
    assert read(fitted.to_json()) == fitted
    assert read(fitted.to_json()).judge(unrated[0]) == fitted.judge(unrated[0])


def test_it_is_silent_with_few_thumbs_and_where_thumbs_say_nothing() -> None:
    assert "10 thumbs; scorer.learned.thumbs_min requires 20" in str(fit(plain(10, "a"), [], DEMANDS).fit_facts.silent)
    chance = random.Random(0)
    noise = [replace(thumbed_run, thumbs=(Thumb("a", float(chance.random() < 0.5)),)) for thumbed_run in plain(60, "a")]
    assert "chance" in str(fit(noise, [], DEMANDS).fit_facts.silent)
    assert fit(noise, [], DEMANDS).judge(noise[0].features) is None


def test_thumbs_that_are_swapped_are_noticed() -> None:
    """A reward of another source must not have a negative weight if all raters agree."""
    swapped = [
        replace(thumbed_run, thumbs=(Thumb("a", 1 - thumbed_run.thumbs[0].value),)) for thumbed_run in plain(60, "a")
    ]
    fitted = fit(swapped, [], DEMANDS)
    likely = fitted.judge({"judge:help": 0.65})
    assert likely is None or likely.value < 0.5, "it says what people say, and never the contrary of it"


def test_it_abstains_of_what_it_has_not_seen_enough_of() -> None:
    usual_runs = plain(60, "a")
    rare_runs = [replace(usual_run, features={**usual_run.features, "rare": 1.0}) for usual_run in usual_runs[:2]]
    training_runs = [*rare_runs, *usual_runs[2:]]
    wide = fit(training_runs, [], replace(DEMANDS, width_max=1.0))
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
    training_runs = [
        replace(thumbed_run, features={**thumbed_run.features, "function:leak": thumbed_run.thumbs[0].value})
        for thumbed_run in plain(60, "a")
    ]
    unrated = [{**thumbed_run.features, **of_others} for thumbed_run in plain(80, "a")]
    fitted = fit(training_runs, unrated, DEMANDS)
    assert fitted.fit_facts.refused == ("function:leak",)
    assert all(column.name != "function:leak" for column in fitted.columns)


def lengthy(count: int, *, judged: bool = True) -> list[ThumbedRun]:
    """Return runs in which people and a judge prefer length, and the rest of the judge's score is noise."""
    draw = random.Random(5)
    thumbed = []
    for number in range(count):
        turns, noise = draw.gauss(2, 1), draw.gauss(0, 1)
        features = {"run/turns": turns, **({"judge:help/warmth": turns + noise} if judged else {})}
        thumb = Thumb(f"u{number % 50}", float(turns + draw.gauss(0, 0.5) > 2))
        thumbed.append(ThumbedRun(f"t{number}", features, (thumb,)))
    return thumbed


def test_what_the_agent_controls_is_learned_and_not_paid() -> None:
    fitted = fit(lengthy(400), [], replace(DEMANDS, width_max=1.0))
    short, long = (fitted.judge({"judge:help/warmth": 2.0, "run/turns": turns}) for turns in (1.0, 3.0))
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
        training_runs = [
            replace(
                thumbed_run,
                features={k: v for k, v in thumbed_run.features.items() if not (hidden and k == "run/turns")},
            )
            for thumbed_run in lengthy(400)
        ]
        fitted = fit(training_runs, [], replace(DEMANDS, width_max=1.0))
        low, high = fitted.judge({"judge:help/warmth": 1.0}), fitted.judge({"judge:help/warmth": 3.0})
        assert low is not None
        assert high is not None
        return high.paid - low.paid

    assert pays(hidden=False) < pays(hidden=True) / 2


def test_it_is_silent_where_the_agent_controls_all_that_it_sees() -> None:
    assert "controls" in str(fit(lengthy(100, judged=False), [], DEMANDS).fit_facts.silent)
    assert fit(lengthy(100, judged=False), [], replace(DEMANDS, controlled=())).fit_facts.silent is None


def test_who_contradicts_everybody_is_not_heard() -> None:
    training_runs = plain(120, "a", "b")
    poisoned = [
        replace(item, thumbs=(*item.thumbs, Thumb("x", 1 - item.thumbs[0].value))) if n % 2 else item
        for n, item in enumerate(training_runs)
    ]
    sound, fitted = fit(training_runs, [], DEMANDS), fit(poisoned, [], DEMANDS)
    assert fitted.fit_facts.unheard == ("x",)
    for score in (0.45, 0.65):
        item, other = sound.judge({"judge:help": score}), fitted.judge({"judge:help": score})
        assert item is not None
        assert other is not None
        assert abs(item.value - other.value) < 0.1


def test_nobody_with_a_name_weighs_more_than_his_share() -> None:
    training_runs = [
        replace(thumbed_run, thumbs=(Thumb("busy" if n % 2 else f"u{n}", 1.0),))
        for n, thumbed_run in enumerate(plain(100, "a"))
    ]
    thumbs = crowd.thumbs_of(training_runs, 0.1)
    weights = np.bincount(thumbs.rater_T, weights=thumbs.weight_T)
    assert weights[thumbs.raters.index("busy")] == pytest.approx(10.0)
    assert weights.sum() == pytest.approx(60.0)
    nameless = crowd.thumbs_of(plain(100, ""), 0.1)
    assert nameless.weight_T.sum() == 100.0, "people without a name are many"
