"""`MultiAgentGame`, `GameTrainer` and `evaluate_win_rate`: a game of hidden roles, played by agents of yours."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.errors import UsageError
from headrace.practice.agents import text_of
from headrace.practice.arguments import whole_number
from headrace.practice.collecting import collected
from headrace.practice.runs import worth_of
from headrace.rl.training import OnlineTrainer, TrinityRFT
from headrace.sessions import Purpose

PARTS = {"team_win": 10.0, "individual_survive": 5.0, "successfully_blame": 2.0, "exposed_penalty": -5.0}
WOLF = "werewolf"
_ROUNDS_MAX = 8


class GamePlayer:
    """One agent in one game: what it did, and how it went."""

    def __init__(self, name: str, role: str, agent: Any) -> None:
        self.name, self.role, self.agent = name, role, agent
        self.alive = True
        self.records: list[dict[str, Any]] = []
        self.events: Counter[str] = Counter()

    def get_trajectory(self) -> dict[str, Any]:
        """Its records of this game with `role` and `events`, which `GameTrainer` rewards."""
        return {"name": self.name, "role": self.role, "events": dict(self.events), "records": list(self.records)}


class MultiAgentGame:
    """`roles` = {"werewolf": 2, "villager": 4}, `agents` = {"werewolf_1": agent, ...}. The moderator here is a plain
    one: by night the wolves name a victim, by day each player speaks, then each votes, and who has most votes is out.

    The wolves win when they are as many as the others, the others when there is no wolf. For rules of your own,
    override `play`: it sets `alive` and `events` of the players and returns the winning role.
    """

    def __init__(self, roles: Mapping[str, int], agents: Mapping[str, Any]) -> None:
        self.roles, self.agents = dict(roles), dict(agents)
        seats = Counter(name.rpartition("_")[0] for name in agents)
        if seats != Counter(roles):
            raise UsageError(f"roles = {dict(roles)}, and the agents are {dict(seats)}; name them werewolf_1 and so on")
        for agent in agents.values():
            agent.game = self

    def run_episode(self, purpose: Purpose = "train") -> dict[str, Any]:
        """One game: {"winner", "rounds", "agents"}; each agent has `get_trajectory()`. Its calls are sessions of their
        own, one for each time that it is asked."""
        players = [GamePlayer(name, name.rpartition("_")[0], agent) for name, agent in self.agents.items()]
        winner, rounds = self.play(players, purpose)
        for player in players:
            player.events["team_win"] = int((player.role == WOLF) == (winner == WOLF))
            player.events["individual_survive"] = int(player.alive)
        return {"winner": winner, "rounds": rounds, "agents": players}

    def play(self, players: Sequence[GamePlayer], purpose: Purpose) -> tuple[str, int]:
        for number in range(1, _ROUNDS_MAX + 1):
            wolves = [one for one in living(players) if one.role == WOLF]
            others = [one for one in living(players) if one.role != WOLF]
            victim = named(ask(wolves[0], f"Night {number}. Name a victim: {names(others)}", purpose), others)
            if victim is not None:
                victim.alive = False
            said = [
                f"{one.name}: {ask(one, f'Day {number}. Speak. {names(living(players))}', purpose)}"
                for one in living(players)
            ]
            self._vote(players, "\n".join(said), purpose)
            wolves = [one for one in living(players) if one.role == WOLF]
            if not wolves or 2 * len(wolves) >= len(living(players)):
                return (WOLF if wolves else "villager"), number
        return "villager", _ROUNDS_MAX

    def _vote(self, players: Sequence[GamePlayer], said: str, purpose: Purpose) -> None:
        """A name that nobody has is no vote. With equal votes nobody is out."""
        votes: list[tuple[GamePlayer, GamePlayer]] = []
        for voter in living(players):
            others = [one for one in living(players) if one is not voter]
            target = named(ask(voter, f"{said}\nVote for one of: {names(others)}", purpose), others)
            if target is not None:
                votes.append((voter, target))
        first = Counter(target.name for _, target in votes).most_common(2)
        if not first or (len(first) > 1 and first[0][1] == first[1][1]):
            return
        out = next(one for one in players if one.name == first[0][0])
        out.alive = False
        out.events["exposed_penalty"] += out.role == WOLF
        for voter, target in votes:
            voter.events["successfully_blame"] += voter.role == WOLF and target is out and out.role != WOLF


class GameTrainer:
    """Trains `agents`, for example the wolves of a `MultiAgentGame`; `reward_function` says what each event is worth.

    The algorithm is the stack's, or that of `framework`. Records of agents that are not trained are passed over."""

    def __init__(
        self,
        agents: Sequence[Any],
        reward_function: Mapping[str, float] | None = None,
        framework: TrinityRFT | None = None,
    ) -> None:
        self.worth = worth_of(PARTS, reward_function)
        self.agents = list(agents)
        if not self.agents:
            raise UsageError("agents: name at least one agent to train")
        self.framework = framework or TrinityRFT("reinforce++")
        if framework is None:
            self.framework.settings.pop("trainer.algorithm")
        self.trainer = OnlineTrainer(self.agents[0], self.framework)

    def add_trajectory(self, trajectory: Mapping[str, Any]) -> None:
        """The game's reward is that of each time the player was asked."""
        if trajectory["name"] not in self._trained():
            return
        events = trajectory["events"]
        parts = {name: worth * events.get(name, 0) for name, worth in self.worth.items()}
        for record in trajectory["records"]:
            self.trainer.add_trajectory({**record, "rewards": parts, "total_reward": sum(parts.values())})

    def _trained(self) -> set[str]:
        """Return the names that the agents have in their games."""
        seats = [(name, agent) for one in self.agents for name, agent in game_of(one).agents.items()]
        return {name for name, agent in seats if any(agent is one for one in self.agents)}

    def train(self) -> dict[str, float]:
        """Waits until everything that was added is trained, as `OnlineTrainer.train_step` does."""
        return self.trainer.train_step()


def evaluate_win_rate(werewolf_agents: Sequence[Any], episodes: int = 100) -> float:
    """How many percent of so many games the wolves win, in the game that these agents are in. Nothing is trained."""
    games = [game_of(agent) for agent in werewolf_agents]
    if not games or any(game is not games[0] for game in games):
        raise UsageError("werewolf_agents: name agents of one MultiAgentGame")
    game, episodes = games[0], whole_number("episodes", episodes)
    wins = sum(game.run_episode(purpose="eval")["winner"] == WOLF for _ in range(episodes))
    return float(100.0 * wins / episodes)


def game_of(agent: Any) -> MultiAgentGame:
    """Return the game that an agent plays in. Raises `UsageError` for none."""
    game = getattr(agent, "game", None)
    if not isinstance(game, MultiAgentGame):
        raise UsageError("these agents are in no MultiAgentGame; make one with them first")
    return game


def ask(player: GamePlayer, text: str, purpose: Purpose) -> str:
    record, answer = collected(player.agent, f"You are {player.name}, a {player.role}.\n{text}", purpose=purpose)
    player.records.append(record)
    return text_of(answer)


def living(players: Sequence[GamePlayer]) -> list[GamePlayer]:
    return [one for one in players if one.alive]


def names(players: Sequence[GamePlayer]) -> str:
    return ", ".join(one.name for one in players)


def named(said: str, players: Sequence[GamePlayer]) -> GamePlayer | None:
    """The player whose name comes first in what was said; None: none does."""
    found = re.search("|".join(re.escape(one.name) for one in players) or "$^", said)
    return next((one for one in players if found and one.name == found[0]), None)
