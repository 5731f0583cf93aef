"""Examples for LEARNER_TOOLS, LEARNER_ENVIRONMENT and LEARNER_AGENT, a file each."""
