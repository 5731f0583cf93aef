"""Penstock: reinforcement-learning post-training as an asynchronous actor-learner pipeline."""
