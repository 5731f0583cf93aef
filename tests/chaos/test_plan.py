from __future__ import annotations

from collections import Counter

from tests.chaos.plan import WHOLE_S, Deck, Floors, Plan, make_plan
from tests.chaos.victims import ACTOR, KINDS, LEARNER, SERVER

ALL = set(KINDS)


def spend(deck: Deck, moved: bool = True) -> list[str]:
    drawn = []
    while deck:
        kind = deck.draw(ALL, moved)
        if kind is not None:
            drawn.append(kind)
    return drawn


def test_a_plan_kills_more_than_its_floors_ask_for():
    for plan in map(make_plan, (60, 300, WHOLE_S)):
        assert plan.kills >= plan.floors.kills
        assert plan.deck["server"] >= plan.floors.server
        assert plan.deck["learner"] >= plan.floors.learner
        assert plan.steps >= plan.floors.updates


def test_a_whole_run_shows_what_is_promised():
    floors = make_plan(WHOLE_S).floors
    assert (floors.kills, floors.server, floors.learner) == (300, 20, 20)
    assert (floors.groups, floors.updates) == (1000, 50)


def test_the_deck_holds_the_plan_in_an_order_that_the_seed_decides():
    plan = make_plan(WHOLE_S)
    once, again, other = (spend(Deck(plan, seed)) for seed in (1, 1, 2))
    assert Counter(once) == Counter(plan.deck)
    assert once == again != other


def test_half_of_the_deck_is_kept_for_the_steps():
    deck = Deck(Plan({SERVER: 32}, 45, 900.0, Floors(20, 20, 0, 540, 45)), 1)
    early = 0
    while not deck.is_kept(0):
        deck.draw(ALL, True)
        early += 1
    assert early == 16
    assert not deck.is_kept(1)


def test_only_what_lives_is_drawn():
    deck = Deck(make_plan(60), 1)
    assert deck.draw({ACTOR}, True) == ACTOR
    assert deck.draw(set(), True) is None


def test_a_learner_that_made_no_step_since_its_last_kill_is_mostly_spared():
    deck = Deck(make_plan(WHOLE_S), 1)
    draws = [deck.draw({LEARNER}, False) for _ in range(40)]
    assert 1 < draws.count(LEARNER) < 20
    assert deck.draw({LEARNER}, True) == LEARNER


def test_kills_come_faster_when_the_run_is_ahead():
    def mean_pause_s(step: int) -> float:
        deck = Deck(make_plan(WHOLE_S), 1)
        return sum(deck.pause_s(100.0, step) for _ in range(2000)) / 2000

    assert mean_pause_s(60) < mean_pause_s(20) < mean_pause_s(10)
