"""A small text game: LEARNER_ENVIRONMENT=text_game.py:House. Rows may have the `start` room."""

from typing import Any

_ROOMS = {
    "hall": {"north": "kitchen", "east": "study"},
    "kitchen": {"south": "hall"},
    "study": {"west": "hall", "down": "cellar"},
    "cellar": {"up": "study"},
}
_THINGS = {"kitchen": "key", "cellar": "treasure"}


class House:
    """Four rooms. The treasure is in the cellar, whose door needs the key from the kitchen."""

    def reset(self, start: str = "hall", **row: Any) -> str:
        """Begin in the room `start` with empty hands; return the task and what is seen there.

        The other columns of the data, `row`, are not used. Raise ValueError for an unknown room.
        """
        if start not in _ROOMS:
            raise ValueError(f"the column start is {start}, write one of {', '.join(_ROOMS)}")
        self._room = start
        self._taken: set[str] = set()
        return f"Find the treasure. {self.look()}"

    def look(self) -> str:
        """Describe the room: its name, a thing that is here, and the ways."""
        thing = _THINGS.get(self._room)
        seen = f" There is a {thing} here." if thing and thing not in self._taken else ""
        return f"You are in the {self._room}.{seen} Ways: {', '.join(_ROOMS[self._room])}."

    def go(self, direction: str) -> str:
        """Go to another room.

        Args:
            direction: One of the ways of this room.

        Returns:
            The description of the new room, or "The door is locked.": the cellar needs the key.

        Raises:
            ValueError: There is no such way.
        """
        if direction not in _ROOMS[self._room]:
            raise ValueError(f"There is no way {direction}. Take one of the ways of the {self._room}.")
        room = _ROOMS[self._room][direction]
        if room == "cellar" and "key" not in self._taken:
            return "The door is locked."
        self._room = room
        return self.look()

    def take(self, thing: str) -> str:
        """Take a thing that is in this room.

        Args:
            thing: Its name.

        Returns:
            "You have the key.", or the same of another thing. It is no longer in the room.

        Raises:
            ValueError: There is no such thing.
        """
        if _THINGS.get(self._room) != thing or thing in self._taken:
            raise ValueError(f"There is no {thing} here. Look at what is here first.")
        self._taken.add(thing)
        return f"You have the {thing}."

    def get_reward(self) -> float:
        """Return 1.0 for the treasure, 0.2 for the key alone, else 0.0."""
        return 1.0 if "treasure" in self._taken else 0.2 if "key" in self._taken else 0.0
