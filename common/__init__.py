"""What the learner, the actors and the rewarders share: messages, protocol, settings, errors."""
