"""`penstock doctor`: the command. It looks at everything that a run needs, and starts none."""

import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from pydantic import Field
from pydantic_settings import BaseSettings, CliToggleFlag, PydanticBaseSettingsSource

from penstock.common.config.command import Result
from penstock.common.config.device import has_gpu
from penstock.common.config.variables import read_environment
from penstock.common.errors import ConfigError, PenstockError
from penstock.deploy.doctor.check import Check
from penstock.deploy.doctor.environment import check_cores, check_gpu, check_packages, check_python
from penstock.deploy.doctor.finding import ORDER, Finding
from penstock.deploy.doctor.folder import check_folder, check_room
from penstock.deploy.doctor.inputs import check_inputs
from penstock.deploy.doctor.machine import Machine, read_machine
from penstock.deploy.doctor.memory import check_memory
from penstock.deploy.doctor.rehearsal import failed, findings_of, warnings_in
from penstock.deploy.doctor.roles import check_roles
from penstock.deploy.doctor.server import check_server
from penstock.deploy.doctor.settings import Settings
from penstock.deploy.doctor.shape import find_config, read_shape
from penstock.deploy.doctor.variables import check_variables, read_settings, removal


class Doctor(Check):
    """Find what would keep a run from going well, before it starts. Nothing is trained or changed.

    Each finding has three lines: severity and what was found, why it matters, what to type or set. The
    settings are variables, as for `penstock up`. The exit code is 78 if there is an error, else 0, also
    with warnings. `penstock check` is part of it, unless --quick is given.
    """

    quick: CliToggleFlag[bool] = Field(
        False, description="leave out what takes long: reading the data set, loading the rewards"
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        *_others: PydanticBaseSettingsSource,
        **_more: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the source of the flags, `init_settings`, alone. The other arguments are not used.

        Variables are no flags here: `find` reports unknown ones, which other commands refuse.
        """
        return (init_settings,)

    def execute(self) -> int:
        """Print all findings, the worst first, after three rows as model and rewards get them.

        With --json print one object per finding and no rows. Return 78 if a finding is an error, else 0.
        Raise ConfigError if the file of --env-file cannot be read.
        """
        shown: list[str] = []
        findings = sorted(self.find(shown), key=lambda one: ORDER.index(one.severity))
        counts = [f"{kind}s: {sum(one.severity == kind for one in findings)}" for kind in ORDER]
        lines = [line for one in findings for line in one.lines()]
        summary = f"{', '.join(counts)}." if findings else "Nothing was found."
        summary += (
            " --quick left out data, rewards and an earlier run of the name." if self.quick else ""
        )
        code = ConfigError.exit_code if any(one.severity == "error" for one in findings) else 0
        rows = [asdict(one) for one in findings]
        return self.show(Result("\n".join([*shown, *lines, summary]), rows, code))

    def find(self, shown: list[str]) -> Iterator[Finding]:
        """Yield the findings of all checks, in their order. Rows for people are added to `shown`.

        Checks that need settings are left out if these are wrong. Raise ConfigError if the file of
        --env-file cannot be read.
        """
        environment = read_environment(self.env_file, strict=False)
        machine = read_machine()
        names = list(check_variables(environment, self.env_file))
        settings, wrong = read_settings(environment, self.env_file)
        yield from [*names, *wrong]
        yield from check_python()
        yield from check_packages(remote=bool(environment.get("REDIS_URL")))
        yield from check_gpu(machine, environment)
        if settings is None:
            shown.append(
                "Left out until the values are right: server, folder, memory, data and rewards."
            )
            return
        machine = machine.seen_with(environment.get("CUDA_VISIBLE_DEVICES"))
        gpu = bool(machine.gpus) and has_gpu()
        yield from check_cores(machine, environment, settings.rewarder)
        yield from check_roles(settings, machine, gpu)
        yield from check_server(settings, removal("REDIS_URL", self.env_file))
        yield from check_folder(settings.run.folder)
        refused = any(one.severity == "error" for one in names)
        yield from (missing := list(check_inputs(settings.learner)))
        found: Result | None = None
        if (refused or missing) and not self.quick:
            shown.append("Left out until the names are right: data and rewards.")
        elif not self.quick:
            found, told = self._rehearse()
            shown += [found.text] if found else []
            yield from told
        yield from _check_sizes(settings, machine, gpu, found)

    def _rehearse(self) -> tuple[Result | None, list[Finding]]:
        """Return what `penstock check` finds, None if a role fails, and the findings on it."""
        with tempfile.TemporaryFile() as errors:
            try:
                found = self.examine(errors)
            except PenstockError as error:
                text = f"check: {type(error).__name__}: {error}"
                return None, [failed(error.exit_code, text)]
            errors.seek(0)
            said = errors.read().decode(errors="replace")
        if isinstance(found, Result):
            return found, [*findings_of(found), *warnings_in(said)]
        return None, [failed(found, said), *warnings_in(said)]


def _check_sizes(
    settings: Settings, machine: Machine, gpu: bool, found: Result | None
) -> Iterator[Finding]:
    """Yield findings on memory and the room on the disk, by the model's config.json.

    `gpu`: learner and actor use the machine's GPUs. `found`, by `penstock check`, has the number of
    steps; with None LEARNER_MAX_STEPS is taken. Without a config.json nothing is estimated.
    """
    config = find_config(settings.learner.model, settings.learner.model_revision)
    try:
        shape = read_shape(config) if config else None
        found_why = f"LEARNER_MODEL={settings.learner.model} has no config.json on this machine"
    except ConfigError as error:
        shape, found_why = None, str(error)
    if shape is None:
        why = "memory and room on the disk were not estimated"
        remedy = "do: download the model, or set LEARNER_MODEL to its folder"
        yield Finding("memory", "info", found_why, why, remedy)
        return
    figures: Any = found.rows[0]["figures"] if found else {}
    yield from check_room(settings, shape, figures.get("steps", settings.learner.max_steps))
    yield from check_memory(settings, shape, machine, gpu)
