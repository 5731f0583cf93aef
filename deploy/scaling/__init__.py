"""More and fewer processes while a run goes on."""
