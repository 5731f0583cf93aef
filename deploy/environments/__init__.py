"""Examples of tools and environments, each a file for LEARNER_TOOLS or LEARNER_ENVIRONMENT."""
