"""The `penstock` command: everything that concerns a run as a whole."""

import sys
from typing import NoReturn

from pydantic import Field
from pydantic_settings import CliSubCommand

from penstock.common.config.command import CommandGroup, execute_command
from penstock.deploy.demo.run import Demo
from penstock.deploy.doctor.check import Check
from penstock.deploy.doctor.run import Doctor
from penstock.deploy.evaluate import Evaluate
from penstock.deploy.profile import Profile
from penstock.deploy.replay import Replay
from penstock.deploy.report.command import Plot, Report
from penstock.deploy.samples import Samples
from penstock.deploy.scaling.autoscale import Autoscale
from penstock.deploy.smollm2 import ConvertSmolLM2
from penstock.deploy.try_reward import TryReward
from penstock.deploy.up import Up


class Penstock(CommandGroup):
    """Post-train language models by reinforcement learning over Redis streams.

    The roles are commands too: `learner`, `actor`, `rewarder`. `queues` reads a run's state.
    """

    up: CliSubCommand[Up] = Field(description="run a learner, actors, rewarders and a queue server")
    check: CliSubCommand[Check] = Field(
        description="settings, data, rewards and gold answers of a run before it starts"
    )
    doctor: CliSubCommand[Doctor] = Field(
        description="what would keep a run from going well, each with what to type"
    )
    try_reward: CliSubCommand[TryReward] = Field(
        description="rewards of a file on gold answers and on garbage"
    )
    demo: CliSubCommand[Demo] = Field(description="teach a tiny model to add, on this machine's CPU")
    evaluate: CliSubCommand[Evaluate] = Field(
        description="answer held-out questions: pass@1, avg@k, maj@k"
    )
    samples: CliSubCommand[Samples] = Field(description="show completions: best, worst, truncated, ...")
    autoscale: CliSubCommand[Autoscale] = Field(
        description="as many actors as keep the learner from waiting"
    )
    profile: CliSubCommand[Profile] = Field(description="where the time of a run's steps went")
    report: CliSubCommand[Report] = Field(
        description="a run, or two side by side, as one HTML file: curves, samples, audit"
    )
    plot: CliSubCommand[Plot] = Field(description="a run's learning curve as a picture")
    replay: CliSubCommand[Replay] = Field(description="train a run again from its journal, and compare")
    convert_smollm2: CliSubCommand[ConvertSmolLM2] = Field(description="SmolLM2-135M as a model folder")


def main() -> NoReturn:
    """Run the `penstock` command and exit with its code."""
    sys.exit(execute_command(Penstock, "penstock"))


if __name__ == "__main__":
    main()
