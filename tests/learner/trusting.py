"""Load a model that brings code of its own, which is trusted, and export it: FOLDER OUT."""

from __future__ import annotations

import sys
from pathlib import Path

from penstock.learner.data.plan import read_model
from penstock.learner.policy.model import load_model
from tests.learner.builders import make_settings

if __name__ == "__main__":
    folder, out = map(Path, sys.argv[1:])
    read_model(folder, trust_remote_code=True)
    model = load_model(folder, make_settings(trust_remote_code=True))
    assert type(model).__name__ == "OwnModel"
    model.save_pretrained(out)
