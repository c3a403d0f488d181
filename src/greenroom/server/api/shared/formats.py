"""llguidance grammars of answers in JSON."""

from __future__ import annotations

import json
from typing import Any

from llguidance import LLMatcher

from greenroom.server.api.shared.schemas import schema_error
from greenroom.server.engine.tokens.grammar import limits, reason
from greenroom.server.http.errors import ApiError

# Otherwise a model could fill the entire answer with spaces.
STRICT: Any = {"whitespace_flexible": False}


def json_grammar(schema: dict[str, Any] | None, param: str) -> str:
    """Make the llguidance grammar of a JSON schema; None means any JSON object.

    ApiError, which names the parameter `param`, if the schema is not supported.
    """
    check_schema(schema, param)
    try:
        text = json.dumps(schema or {"type": "object"})
        grammar = LLMatcher.grammar_from_json_schema(text, overrides=STRICT)
        wrong = LLMatcher.validate_grammar(grammar, limits=limits())
    except (ValueError, RecursionError) as error:
        wrong = str(error)
    if wrong and not wrong.startswith("WARNING"):
        raise _refused(param, reason(wrong))
    return grammar


def check_schema(schema: Any, param: str) -> None:
    """Raise ApiError if a JSON schema, or a list of schemas, is too large."""
    if wrong := schema_error(schema):
        raise _refused(param, wrong)


def _refused(param: str, why: str) -> ApiError:
    return ApiError(400, f"{param} is a schema that is not supported: {why}", param=param)
