"""The settings of all roles together, as one run has them."""

from pydantic import BaseModel

from penstock.common.config.learner_settings import LearnerSettings
from penstock.common.config.settings import ActorSettings, RewarderSettings, RunSettings


class Settings(BaseModel):
    """The settings of all roles, and the queue server's URL, "" for a server of the run's own."""

    redis_url: str = ""
    run: RunSettings = RunSettings()
    learner: LearnerSettings = LearnerSettings()
    actor: ActorSettings = ActorSettings()
    rewarder: RewarderSettings = RewarderSettings()
