"""JSON answers: a grammar that an answer must follow, by llguidance."""

from __future__ import annotations

from typing import Any

from llguidance import LLMatcher

from greenroom.server.errors import ApiError

# Otherwise a model that likes spaces could fill the whole answer with them.
STRICT: Any = {"whitespace_flexible": False}


def json_grammar(schema: dict[str, Any] | None, param: str) -> str:
    """The grammar of a JSON schema, or of any object. ApiError that names `param` if it is none."""
    try:
        grammar = LLMatcher.grammar_from_json_schema(schema or {"type": "object"}, overrides=STRICT)
        wrong = LLMatcher.validate_grammar(grammar)
    except (ValueError, RecursionError) as error:
        wrong = str(error)
    if wrong and not wrong.startswith("WARNING"):
        reason = " ".join(wrong.split())[:300]
        raise ApiError(400, f"{param} is a schema that is not supported: {reason}", param=param)
    return grammar
