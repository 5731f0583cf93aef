"""A tool that computes: LEARNER_TOOLS=calculator.py:calculate."""


def calculate(expression: str) -> str:
    """Compute an expression such as 12*(3+4).

    Args:
        expression: Numbers, brackets and the signs + - * /

    Returns:
        The result as a text, such as 84.

    Raises:
        ValueError: There is something else in it, or a power (**).
        SyntaxError: It is malformed.
        ZeroDivisionError: It divides by 0.
    """
    if set(expression) - set("0123456789.+-*/() ") or "**" in expression:
        raise ValueError("write only numbers, brackets and + - * /, found something else")
    return str(eval(expression))
