"""Random calls, and how each format's models write them. The tests' own: nothing of it is shared with the parser."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Call = tuple[str, dict[str, Any]]

SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "scale": {"type": "number"},
            "exact": {"type": "boolean"},
            "where": {"type": "object"},
            "hours": {"type": "array"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "größe": {"$ref": "#/$defs/size"},
        },
        "$defs": {"size": {"enum": ["S", "M"]}},
    },
    "now": {"type": "object", "properties": {}},
    "calc.add-2": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
}
TEXTS = [
    "",
    "a",
    "Köln",
    "x\ny",
    '"quoted"',
    "back\\slash",
    "tab\there",
    "</tool",
    "{}",
    "[1]",
    "日本",
    "😀",
    "it's",
    "<a>",
    "a, b",
    "1 = 2",
]

ENDS = ["</parameter>", "\n</parameter>\n</function>", "</arg_value>\n"]  # of values that are written bare


def random_value(rng: random.Random, kind: str, depth: int = 0) -> Any:
    match kind:
        case "string":
            return "".join(rng.choices(TEXTS + ENDS * bool(depth), k=rng.randrange(4)))
        case "integer":
            return rng.choice([0, -1, 7, 10**12])
        case "number":
            return rng.choice([0.5, -2.25, 1e30, 3, 1e-7])
        case "boolean":
            return rng.random() < 0.5
        case "null":
            return None
        case "size":
            return rng.choice("SM")
        case "array":
            return [random_any(rng, depth + 1) for _ in range(rng.randrange(4))]
        case _:
            return {
                rng.choice(["k", "ü", "a b", 'q"', ""]): random_any(rng, depth + 1) for _ in range(rng.randrange(3))
            }


def random_any(rng: random.Random, depth: int) -> Any:
    kinds = ["string", "integer", "number", "boolean", "null"] + ["array", "object"] * (depth < 3)
    return random_value(rng, rng.choice(kinds), depth)


def random_call(rng: random.Random) -> Call:
    name = rng.choice(list(SCHEMAS))
    kinds = {
        key: rng.choice(["string", "null"]) if key == "note" else schema.get("type", "size")
        for key, schema in SCHEMAS[name]["properties"].items()
    }
    chosen = [key for key in kinds if rng.random() < 0.6]
    rng.shuffle(chosen)
    return name, {key: random_value(rng, kinds[key]) for key in chosen}


QUOTE = '<|"|>'


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def in_json(call: Call, key: str = "arguments") -> str:
    return f'{{"name": {dumped(call[0])}, "{key}": {dumped(call[1])}}}'


def bare(value: Any) -> str:
    return value if isinstance(value, str) else dumped(value) if isinstance(value, dict | list) else str(value)


def tagged(call: Call) -> str:
    args = "".join(f"<parameter={key}>\n{bare(value)}\n</parameter>\n" for key, value in call[1].items())
    return f"<function={call[0]}>\n{args}</function>"


def glm(call: Call) -> str:
    args = (f"<arg_key>{key}</arg_key>\n<arg_value>{bare_json(value)}</arg_value>\n" for key, value in call[1].items())
    return f"<tool_call>{call[0]}\n{''.join(args)}</tool_call>"


def bare_json(value: Any) -> str:
    return value if isinstance(value, str) else dumped(value)


def gemma_value(value: Any, quote: str) -> str:
    match value:
        case str():
            return f"{quote}{value}{quote}"
        case dict():
            return "{" + ",".join(f"{quote}{key}{quote}:{gemma_value(one, quote)}" for key, one in value.items()) + "}"
        case list():
            return "[" + ",".join(gemma_value(one, quote) for one in value) + "]"
        case _:
            return dumped(value)


def gemma(call: Call, quote: str = "<escape>") -> str:
    args = ",".join(f"{key}:{gemma_value(value, quote)}" for key, value in call[1].items())
    return f"call:{call[0]}{{{args}}}"


def deepseek(call: Call) -> str:
    return f"{wide('call▁begin')}{call[0]}{wide('sep')}{dumped(call[1])}{wide('call▁end')}"


def wide(name: str) -> str:
    """A mark of DeepSeek's."""
    return f"<\uff5ctool▁{name}\uff5c>"


def python(call: Call) -> str:
    return f"{call[0]}({', '.join(f'{key}={value!r}' for key, value in call[1].items())})"


RENDER: Mapping[str, Callable[[Sequence[Call]], str]] = {
    "hermes": lambda calls: "\n".join(f"<tool_call>\n{in_json(call)}\n</tool_call>" for call in calls),
    "xml": lambda calls: "\n".join(f"<tool_call>\n{tagged(call)}\n</tool_call>" for call in calls),
    "glm": lambda calls: "\n".join(map(glm, calls)),
    "llama": lambda calls: "; ".join(in_json(call, "parameters") for call in calls),
    "pythonic": lambda calls: f"[{', '.join(map(python, calls))}]",
    "mistral-list": lambda calls: f"[TOOL_CALLS] [{', '.join(map(in_json, calls))}]",
    "mistral": lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{dumped(args)}" for name, args in calls),
    "granite": lambda calls: f"<|tool_call|>[{', '.join(map(in_json, calls))}]",
    "phi4": lambda calls: f"<|tool_call|>[{', '.join(map(in_json, calls))}]<|/tool_call|>",
    "gemma": lambda calls: "".join(f"<start_function_call>{gemma(call)}<end_function_call>" for call in calls),
    "gemma4": lambda calls: "".join(f"<|tool_call>{gemma(call, QUOTE)}<tool_call|>" for call in calls),
    "lfm": lambda calls: f"<|tool_call_start|>[{', '.join(map(python, calls))}]<|tool_call_end|>",
    "nemotron": lambda calls: f"<TOOLCALL>[{', '.join(map(in_json, calls))}]</TOOLCALL>",
    "apriel": lambda calls: f"<tool_calls>[{', '.join(map(in_json, calls))}]</tool_calls>",
    "deepseek": lambda calls: f"{wide('calls▁begin')}{''.join(map(deepseek, calls))}{wide('calls▁end')}",
}
