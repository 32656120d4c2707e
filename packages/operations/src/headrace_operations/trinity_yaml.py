"""Conversion of Trinity's explorer and trainer YAML to settings of Headrace, with an explanation for every key.

A key without an equivalent is refused by name if leaving it out would change the behaviour.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from headrace.errors import UsageError
from headrace_operations.arguments import model_name
from headrace_operations.supervisor.overrides import toml
from headrace_schemas.values.text import printable, printable_lines, read_user_text

Rule = Callable[[Any], tuple[dict[str, Any], str]]
ALGORITHMS = {"reinforceplusplus": "reinforce++"}
"""Names of algorithms that differ. The trainer refuses an algorithm that it does not have."""
_REPLICA = 8010
PARSERS = {"deepseek_r1": "think", "qwen3": "think"}


class Unconvertible(Exception):
    """Error of a value that cannot be converted. The message is appended to the key and the value."""


def copy_to_setting(name: str) -> Rule:
    """Return a rule that copies a value to the setting `name` of Headrace."""
    return lambda value: ({name: value}, "")


def accept_only(*allowed: Any, why: str, explanation: str) -> Rule:
    """Return a rule for a key that needs no setting. It accepts the `allowed` values and refuses all others.

    Args:
        allowed: the accepted values.
        why: reason for refusing other values.
        explanation: text for the user about an accepted value.
    """

    def rule(value: Any) -> tuple[dict[str, Any], str]:
        if value not in allowed:
            raise Unconvertible(why)
        return {}, explanation

    return rule


def model(path: Any) -> tuple[dict[str, Any], str]:
    name = model_name(path)
    aliases = {"gateway.model_aliases": {str(path): name}} if str(path) != name else {}
    return {"trainer.base": str(path), "trainer.model": name, **aliases}, (
        f"trainer.base = {path!r}; the model is called {name!r}, and clients may go on calling it by its path"
    )


def algorithm(name: Any) -> tuple[dict[str, Any], str]:
    return {"trainer.algorithm": ALGORITHMS.get(name, name)}, ""


def parser(kind: str) -> Rule:
    return lambda name: ({f"inference.{kind}": PARSERS.get(name, name)}, "")


def tasks(count: Any) -> tuple[dict[str, Any], str]:
    return {
        "data.tasks_per_step": count
    }, f"a step is on {count} tasks: trainer.batch_experiences is that times the runs"


def port(number: Any) -> tuple[dict[str, Any], str]:
    """Convert Trinity's `explorer.proxy_port` to `gateway.port`.

    Trinity's usual port 8010 is also the default of `inference.port`. In this case `inference.port` is set to 8011.
    """
    replica_port = {"inference.port": int(number) + 1} if int(number) == _REPLICA else {}
    return {"gateway.port": number, **replica_port}, ""


def copy_to_data(name: str, explanation: str = "for the program that plays the tasks") -> Rule:
    """Return a rule for a key without an equivalent setting, which copies the value to `Conversion.data`.

    Args:
        name: key in `Conversion.data`.
        explanation: text for the user.
    """
    return lambda value: ({f"data.{name}": value}, explanation)


def copy_text_to_data(name: str) -> Rule:
    def rule(value: Any) -> tuple[dict[str, Any], str]:
        if not isinstance(value, str):
            raise Unconvertible("must be a text")
        return copy_to_data(name)(value)

    return rule


_ALWAYS = "Headrace always does this"
_DEVICES = "devices are assigned where services are started: docs/guides/sizing.md"
_RETENTION = "registry.versions_bytes_max and trainer.memory.restore_points_bytes limit the stored versions"
_IGNORED = "has no effect: Trinity itself ignores this key with verl 0.8"
_CLIENT = "each call sets this value itself; the gateway records it and does not change it"
_ON = accept_only(True, why="Headrace cannot turn this off; set True", explanation=_ALWAYS)

KEYS: dict[str, str | Rule] = {
    "mode": accept_only(
        "serve", "train", "both", why="must be serve, train or both", explanation="`headrace up` serves and trains"
    ),
    "project": copy_to_data("project", "names the lineage"), "group": copy_to_data("group", "names the lineage"),
    "name": copy_to_data("name", "names the lineage"),
    "checkpoint_root_dir": copy_to_setting("data_dir"),
    "continue_from_checkpoint": _ON,
    "model.model_path": model,
    "model.max_model_len": copy_to_setting("inference.torch.context_tokens_max"),
    "model.max_response_tokens": copy_to_data("max_tokens", _CLIENT),
    "model.max_prompt_tokens": "Headrace never cuts a prompt; it refuses a prompt that is too long",
    "model.temperature": copy_to_data("temperature", _CLIENT), "model.top_p": copy_to_data("top_p", _CLIENT),
    "model.top_k": accept_only(
        -1, 0,
        why="answers sampled with top_k are not trained; set -1, or remove the key",
        explanation=_CLIENT,
    ),
    "algorithm.algorithm_type": algorithm,
    "algorithm.repeat_times": copy_to_setting("trainer.group_size"),
    "algorithm.optimizer.lr": copy_to_setting("trainer.optimizer.learning_rate"),
    "algorithm.kl_loss_fn_args.kl_coef": copy_to_setting("trainer.loss.kl"),
    "algorithm.kl_loss_fn": accept_only(
        "none", "k3", "low_var_kl",
        why="trainer.loss.kl uses the estimator k3; set k3",
        explanation="trainer.loss.kl uses the estimator k3",
    ),
    "cluster.node_num": _DEVICES, "cluster.gpu_per_node": _DEVICES, "cluster.ray_address": _DEVICES,
    "explorer.name": "not needed: there is one gateway",
    "explorer.runner_per_model": "the program that plays tasks decides how many runs it starts at once",
    "explorer.rollout_model.engine_num": copy_to_data("engine_num", _DEVICES),
    "explorer.rollout_model.tensor_parallel_size": copy_to_data("tensor_parallel_size", _DEVICES),
    "explorer.rollout_model.enable_openai_api": _ON, "explorer.rollout_model.enable_openai_client": _ON,
    "explorer.rollout_model.enable_history": _ON, "explorer.rollout_model.enable_auto_tool_choice": _ON,
    "explorer.rollout_model.tool_call_parser": parser("tool_parser"),
    "explorer.rollout_model.reasoning_parser": parser("reasoning_parser"),
    "explorer.rollout_model.enable_thinking": copy_to_data(
        "enable_thinking", "the chat template decides; a call may set it in chat_template_kwargs"
    ),
    "explorer.rollout_model.dtype": copy_to_setting("inference.torch.dtype"),
    "explorer.rollout_model.seed": _CLIENT,
    "explorer.service_status_check_interval": "replicas load a new version within a second of its decision",
    "explorer.min_running_model_num": "a replica loads a new version while it serves the old one, so no replica stops",
    "explorer.proxy_port": port, "explorer.listen_address": copy_to_setting("gateway.host"),
    "explorer.max_timeout": "a call ends when its client disconnects",
    "explorer.db_url": "not needed: turns are stored on the bus",
    "buffer.train_batch_size": copy_to_setting("trainer.batch_experiences"),
    "buffer.batch_size": tasks,
    "buffer.total_epochs": copy_to_data("epochs"), "buffer.total_steps": copy_to_data("steps"),
    "buffer.explorer_input.taskset.path": copy_text_to_data("path"),
    "buffer.explorer_input.taskset.split": copy_text_to_data("split"),
    "buffer.explorer_input.taskset.name": copy_text_to_data("tasks"),
    "buffer.explorer_input.taskset.storage_type": "read from the path: a file or a data set",
    "buffer.explorer_input.taskset.subset_name": copy_text_to_data("subset"),
    "buffer.explorer_input.taskset.format.prompt_key": copy_text_to_data("prompt_key"),
    "buffer.explorer_input.taskset.format.response_key": copy_text_to_data("response_key"),
    "buffer.explorer_input.taskset.rollout_args.*": _CLIENT,
    "buffer.explorer_input.taskset.rollout_args.temperature": copy_to_data("temperature", _CLIENT),
    "buffer.explorer_input.taskset.rollout_args.top_p": copy_to_data("top_p", _CLIENT),
    "buffer.explorer_input.taskset.rollout_args.max_tokens": copy_to_data("max_tokens", _CLIENT),
    "buffer.explorer_input.default_workflow_type": "the program that plays tasks selects its workflow",
    "buffer.trainer_input.experience_buffer.name": "experiences are stored on the topic `experiences`",
    "buffer.trainer_input.experience_buffer.storage_type": "experiences are stored on the bus",
    "buffer.trainer_input.experience_buffer.path": "bus.address sets the address of the bus",
    "buffer.trainer_input.experience_buffer.max_read_timeout": "the trainer waits for experiences without a limit",
    "trainer.save_interval": copy_to_data(
        "save_interval", "trainer.steps_per_version decides how often a version is saved"
    ),
    "trainer.trainer_type": _ALWAYS,
    "trainer.total_steps": copy_to_setting("trainer.max_steps"),
    "trainer.ulysses_sequence_parallel_size": accept_only(
        1,
        why="a sequence is never split over devices; set 1",
        explanation="a sequence is never split over devices",
    ),
    "trainer.save_hf_checkpoint": accept_only(
        "always", "last",
        why="every version is saved in the Hugging Face layout; set always or last",
        explanation=_ALWAYS,
    ),
    "trainer.max_checkpoints_to_keep": _RETENTION,
    "trainer.trainer_config.trainer.balance_batch": _IGNORED,
    "trainer.trainer_config.trainer.max_actor_ckpt_to_keep": _IGNORED,
    "trainer.trainer_config.trainer.max_critic_ckpt_to_keep": _IGNORED,
    "trainer.grad_clip": copy_to_setting("trainer.optimizer.gradient_norm_max"),
    "synchronizer.sync_method": accept_only(
        "checkpoint", why="weights are transferred as checkpoints; set checkpoint", explanation=_ALWAYS
    ),
    "synchronizer.sync_style": accept_only(
        "fixed", "dynamic_by_explorer", "explorer_driven",
        why="a step begins when a batch is complete; set fixed", explanation="a step begins when a batch is complete",
    ),
    "synchronizer.sync_interval": copy_to_setting("trainer.steps_per_version"),
    "synchronizer.sync_timeout": "not needed: a replica loads a new version while it serves the old one",
    "synchronizer.sync_offset": "not needed: a replica loads a new version while it serves the old one",
    "monitor.monitor_type": accept_only(
        "tensorboard",
        why="Headrace writes TensorBoard files and Prometheus metrics; set tensorboard",
        explanation="TensorBoard files are in <data_dir>/trainer/tensorboard",
    ),
}  # fmt: skip


@dataclass
class Conversion:
    """Settings that were converted from Trinity's YAML, with explanations.

    `settings` are by dotted name, `lines` has an explanation for every key, and `refused` has the reasons why the
    conversion fails.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    lines: list[tuple[str, str]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    """Values for the program that plays, such as the location of tasks and the number of steps."""
    keys: dict[str, str] = field(default_factory=dict)
    """Key of Trinity's file for each name in `settings` and `data`."""
    idle: list[tuple[str, str]] = field(default_factory=list)
    """Keys without an effect in Headrace, with the reason."""


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML loader that refuses duplicate keys, of which YAML would silently use the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            name = str(getattr(key, "value", ""))
            if name in seen and name != "<<":
                line = key.start_mark.line + 1
                raise yaml.YAMLError(
                    f"line {line}: the key {printable(name)} is used twice in a table; remove one of them"
                )
            seen.add(name)
        return super().construct_mapping(node, deep)


def read(path: Path) -> dict[str, Any]:
    """Read a YAML file.

    Raises:
        UsageError: the file is not a YAML table.
    """
    try:
        table = yaml.load(read_user_text(path), Loader=_UniqueKeyLoader)  # noqa: S506 (a SafeLoader)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}; name a YAML file of Trinity-RFT") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise UsageError(f"{path} is not YAML: {printable_lines(str(error), 500)}") from None
    except ValueError as error:
        raise UsageError(f"{path} {error}") from None
    if not isinstance(table, dict):
        raise UsageError(f"{path}: must be a table of keys")
    return table


def convert(*files: Mapping[str, Any]) -> Conversion:
    """Convert the tables of Trinity's YAML files: one file each for explorer and trainer, or one for both.

    The keys of all files form one table. A key with different values in two files is refused.
    """
    conversion = Conversion()
    keys: dict[str, Any] = {}
    for file in files:
        for key, value in flatten_keys(file).items():
            if key in keys and keys[key] != value and key not in _PER_FILE_KEYS:
                conversion.refused.append(
                    f"{key}: is {keys[key]!r} in one file and {value!r} in the other; must be equal"
                )
            keys[key] = value
    for key in sorted(keys):
        _convert_key(key, keys[key], conversion)
    _combine_keys(keys, conversion)
    return conversion


_PER_FILE_KEYS = frozenset(
    {"mode", "buffer.train_batch_size", "trainer.save_interval", "trainer.ulysses_sequence_parallel_size"}
)
"""Keys that each file has for itself; the value of the last file, the trainer's, is used."""


def flatten_keys(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the entries of nested tables by dotted key. A table that is itself a key of `KEYS` stays a value."""
    keys: dict[str, Any] = {}
    for name, value in table.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and key not in KEYS:
            keys |= flatten_keys(value, f"{key}.")
        else:
            keys[key] = value
    return keys


def _convert_key(key: str, value: Any, conversion: Conversion) -> None:
    rule = KEYS.get(key) or KEYS.get(f"{key.rpartition('.')[0]}.*")
    if value is None:
        conversion.lines.append((key, "is not set; Headrace uses its default"))
    elif rule is None:
        assignment = f"{printable(key)} = {printable(repr(value))}"
        conversion.refused.append(f"{assignment}: has no equivalent; remove it if nothing depends on it")
    else:
        _apply_rule(key, value, rule, conversion)


def _apply_rule(
    key: str, value: Any, rule: str | Callable[[Any], tuple[dict[str, Any], str]], conversion: Conversion
) -> None:
    if isinstance(rule, str):
        conversion.lines.append((key, rule))
        conversion.idle.append((key, rule))
        return
    try:
        if isinstance(value, list | tuple | dict):
            raise Unconvertible("must be one value")
        settings, explanation = rule(value)
    except Unconvertible as error:
        conversion.refused.append(f"{printable(key)} = {printable(repr(value))}: {error}")
        return
    except (TypeError, ValueError, OverflowError):
        conversion.refused.append(f"{printable(key)} = {printable(repr(value))}: must be a number")
        return
    for name, converted in settings.items():
        (conversion.data if name.startswith("data.") else conversion.settings)[name] = converted
        conversion.keys[name] = key
    conversion.lines.append(
        (key, explanation or ", ".join(f"{name} = {converted!r}" for name, converted in settings.items()))
    )


def _combine_keys(keys: Mapping[str, Any], conversion: Conversion) -> None:
    """Add the settings that depend on two keys of Trinity's configuration."""
    names = [str(keys[key]) for key in ("project", "group", "name") if keys.get(key)]
    if names:
        conversion.settings["trainer.lineage"] = model_name("-".join(names))
    counts = {"trainer.group_size": 1, "data.tasks_per_step": 0}
    for name in counts:
        value = conversion.settings.get(name, conversion.data.get(name, counts[name]))
        if isinstance(value, bool) or not isinstance(value, int):
            conversion.refused.append(f"{conversion.keys[name]} = {printable(repr(value))}: must be a whole number")
            return
        counts[name] = value
    group, tasks = counts.values()
    if tasks and "trainer.batch_experiences" not in conversion.settings:
        conversion.settings["trainer.batch_experiences"] = tasks * group


def settings_file(conversion: Conversion) -> str:
    """Return the settings as the text of a settings file, with a section for each service."""
    tables: dict[str, list[str]] = {}
    for name, value in sorted(conversion.settings.items()):
        section, _, setting = name.rpartition(".")
        tables.setdefault(section, []).append(f"{setting} = {toml(value)}")
    parts = [("", tables.pop(""))] if "" in tables else []
    sections = [
        (f"[{section}]\n" if section else "") + "\n".join(lines) for section, lines in [*parts, *tables.items()]
    ]
    return "# From Trinity-RFT's files, by `headrace trinity convert`.\n" + "\n\n".join(sections) + "\n"
