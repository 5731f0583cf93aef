"""How the weights of announced versions come to an actor, and into its engine."""
