"""A game of hidden roles between agents (`MultiAgentGame`), its trainer, and the win rate of the wolves."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.errors import UsageError
from headrace.sessions import Purpose
from headrace_integrations.practice.collecting import collect_run
from headrace_integrations.practice.runs import part_values, text_of
from headrace_integrations.rl.training import OnlineTrainer, TrinityRFT
from headrace_operations.arguments import whole_number

PARTS = {"team_win": 10.0, "individual_survive": 5.0, "successfully_blame": 2.0, "exposed_penalty": -5.0}
WOLF = "werewolf"
_ROUNDS_MAX = 8


class GamePlayer:
    """One agent in one game, with the records of its calls and the events that determine its reward."""

    def __init__(self, name: str, role: str, agent: Any) -> None:
        self.name, self.role, self.agent = name, role, agent
        self.alive = True
        self.records: list[dict[str, Any]] = []
        self.events: Counter[str] = Counter()

    def get_trajectory(self) -> dict[str, Any]:
        """Return the records of this game with `role` and `events`, from which `GameTrainer` computes rewards."""
        return {"name": self.name, "role": self.role, "events": dict(self.events), "records": list(self.records)}


class MultiAgentGame:
    """Game of hidden roles with a simple moderator.

    At night the wolves choose a victim. By day each player makes a statement and then votes, and the player with the
    most votes is eliminated. The wolves win when they are as many as the others, and the others win when there is no
    wolf. For other rules, override `play`: it sets `alive` and `events` of the players and returns the winning role.

    Args:
        roles: number of players by role, for example {"werewolf": 2, "villager": 4}.
        agents: agents by player name, for example {"werewolf_1": agent, ...}.
    """

    def __init__(self, roles: Mapping[str, int], agents: Mapping[str, Any]) -> None:
        self.roles, self.agents = dict(roles), dict(agents)
        seats = Counter(name.rpartition("_")[0] for name in agents)
        if seats != Counter(roles):
            raise UsageError(
                f"roles = {dict(roles)}: do not match the agents, {dict(seats)}; "
                "name agents by role and number, as werewolf_1"
            )
        for agent in agents.values():
            agent.game = self

    def run_episode(self, purpose: Purpose = "train") -> dict[str, Any]:
        """Play one game and return {"winner", "rounds", "agents"}. Each agent has `get_trajectory()`.

        Each call of an agent is a session of its own.
        """
        players = [GamePlayer(name, name.rpartition("_")[0], agent) for name, agent in self.agents.items()]
        winner, rounds = self.play(players, purpose)
        for player in players:
            player.events["team_win"] = int((player.role == WOLF) == (winner == WOLF))
            player.events["individual_survive"] = int(player.alive)
        return {"winner": winner, "rounds": rounds, "agents": players}

    def play(self, players: Sequence[GamePlayer], purpose: Purpose) -> tuple[str, int]:
        """Play the rounds of one game and return the winning role and the number of rounds."""
        for number in range(1, _ROUNDS_MAX + 1):
            wolves = [player for player in living_players(players) if player.role == WOLF]
            villagers = [player for player in living_players(players) if player.role != WOLF]
            reply = ask_player(wolves[0], f"Night {number}. Name a victim: {player_names(villagers)}", purpose)
            victim = mentioned_player(reply, villagers)
            if victim is not None:
                victim.alive = False
            prompt = f"Day {number}. Speak. {player_names(living_players(players))}"
            statements = [f"{player.name}: {ask_player(player, prompt, purpose)}" for player in living_players(players)]
            self._vote(players, "\n".join(statements), purpose)
            wolves = [player for player in living_players(players) if player.role == WOLF]
            if not wolves or 2 * len(wolves) >= len(living_players(players)):
                return (WOLF if wolves else "villager"), number
        return "villager", _ROUNDS_MAX

    def _vote(self, players: Sequence[GamePlayer], discussion: str, purpose: Purpose) -> None:
        """Collect the votes and eliminate a player. An unknown name is no vote, and a tie eliminates no player."""
        votes: list[tuple[GamePlayer, GamePlayer]] = []
        for voter in living_players(players):
            candidates = [player for player in living_players(players) if player is not voter]
            prompt = f"{discussion}\nVote for one of: {player_names(candidates)}"
            target = mentioned_player(ask_player(voter, prompt, purpose), candidates)
            if target is not None:
                votes.append((voter, target))
        first = Counter(target.name for _, target in votes).most_common(2)
        if not first or (len(first) > 1 and first[0][1] == first[1][1]):
            return
        eliminated = next(player for player in players if player.name == first[0][0])
        eliminated.alive = False
        eliminated.events["exposed_penalty"] += eliminated.role == WOLF
        for voter, target in votes:
            voter.events["successfully_blame"] += (
                voter.role == WOLF and target is eliminated and eliminated.role != WOLF
            )


class GameTrainer:
    """Trainer for agents of a `MultiAgentGame`, for example the wolves.

    Records of agents that are not trained are ignored.

    Args:
        agents: agents to train.
        reward_function: reward of each event by its name.
        framework: algorithm and settings; by default the algorithm of the stack.
    """

    def __init__(
        self,
        agents: Sequence[Any],
        reward_function: Mapping[str, float] | None = None,
        framework: TrinityRFT | None = None,
    ) -> None:
        self.worth = part_values(PARTS, reward_function)
        self.agents = list(agents)
        if not self.agents:
            raise UsageError("agents: name at least one agent to train")
        self.framework = framework or TrinityRFT("reinforce++")
        if framework is None:
            self.framework.settings.pop("trainer.algorithm")
        self.trainer = OnlineTrainer(self.agents[0], self.framework)

    def add_trajectory(self, trajectory: Mapping[str, Any]) -> None:
        """Add the records of a player. The reward of the game applies to each call of the player."""
        if trajectory["name"] not in self._trained_names():
            return
        events = trajectory["events"]
        parts = {name: worth * events.get(name, 0) for name, worth in self.worth.items()}
        for record in trajectory["records"]:
            self.trainer.add_trajectory({**record, "rewards": parts, "total_reward": sum(parts.values())})

    def _trained_names(self) -> set[str]:
        """Return the player names of the trained agents."""
        seats = [(name, player) for agent in self.agents for name, player in game_of(agent).agents.items()]
        return {name for name, player in seats if any(player is agent for agent in self.agents)}

    def train(self) -> dict[str, float]:
        """Wait until all added records are trained, as `OnlineTrainer.train_step` does."""
        return self.trainer.train_step()


def evaluate_win_rate(werewolf_agents: Sequence[Any], episodes: int = 100) -> float:
    """Play `episodes` games without training, and return the percentage of games that the wolves win."""
    games = [game_of(agent) for agent in werewolf_agents]
    if not games or any(game is not games[0] for game in games):
        raise UsageError("werewolf_agents: name agents of one MultiAgentGame")
    game, episodes = games[0], whole_number("episodes", episodes)
    wins = sum(game.run_episode(purpose="eval")["winner"] == WOLF for _ in range(episodes))
    return float(100.0 * wins / episodes)


def game_of(agent: Any) -> MultiAgentGame:
    """Return the game of an agent. Raises `UsageError` if it plays in none."""
    game = getattr(agent, "game", None)
    if not isinstance(game, MultiAgentGame):
        raise UsageError("agents: must play in a MultiAgentGame; create a game with these agents first")
    return game


def ask_player(player: GamePlayer, text: str, purpose: Purpose) -> str:
    """Call the agent of a player with a text, add the record of the call to the player, and return the answer's
    text.
    """
    record, answer = collect_run(player.agent, f"You are {player.name}, a {player.role}.\n{text}", purpose=purpose)
    player.records.append(record)
    return text_of(answer)


def living_players(players: Sequence[GamePlayer]) -> list[GamePlayer]:
    """Return the players that are alive."""
    return [player for player in players if player.alive]


def player_names(players: Sequence[GamePlayer]) -> str:
    """Return the names of players as a comma-separated text."""
    return ", ".join(player.name for player in players)


def mentioned_player(reply: str, players: Sequence[GamePlayer]) -> GamePlayer | None:
    """Return the player whose name occurs first in a reply, or None if the reply contains no name."""
    match = re.search("|".join(re.escape(player.name) for player in players) or "$^", reply)
    return next((player for player in players if match and player.name == match[0]), None)
