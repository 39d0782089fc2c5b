"""Calls in Gemma's notation, and its thoughts."""

from __future__ import annotations

from support.transcripts import Call, Transcript, wrote, wrote_text

from pipedec.text.parsers.reader import Thought

ADDED = Call("add", '{"a": 1}')
ADD = "<|tool_call>call:add{a:1}<tool_call|>"


def _transcripts(begin: str, end: str, quote: str) -> list[Transcript]:
    def call(arguments: str, name: str = "add") -> str:
        return f"{begin}call:{name}{arguments}{end}".replace("'", quote)

    add = call("{a:1}")
    return [
        wrote(""),
        wrote_text("Plain {text}."),
        wrote(add, ADDED),
        wrote(f"{add}{add}\n", ADDED, ADDED),
        wrote(f"I look.\n{add} Done.", "I look.", ADDED, " Done."),
        wrote(call("{city:'Paris',days:2}", "weather"), Call("weather", '{"city": "Paris", "days": 2}')),
        wrote(call("{}", "get.time-now"), Call("get.time-now", "{}")),
        wrote(call("{ }"), Call("add", "{}")),
        wrote(call("{a:-1.5e3,b:true,c:null,more:[1,'x',[],{}, [ {k:false} ] ]}"),
              Call("add", '{"a": -1.5e3, "b": true, "c": null, "more": [1, "x", [], {}, [{"k": false}]]}')),
        wrote(call("{text:'a \"quoted\" \\ }, {x:1} \n<b> ü😀',tags:{'a key':'',b:{c:[2]}}}", "note"),
              Call("note", '{"text": "a \\"quoted\\" \\\\ }, {x:1} \\n<b> ü😀", "tags": {"a key": "", "b": {"c": [2]}}}')),
        wrote(call(f"{{text:'{end} {begin}'}}", "note"), Call("note", f'{{"text": "{end} {begin}"}}')),
        wrote(call('{ "a" : True , b:None,c:"x",d:some text,e:NaN}'),
              Call("add", '{"a": true, "b": null, "c": "x", "d": "some text", "e": "NaN"}')),
        # a mark that is missing, a tool that is unknown, and what is no value
        wrote(add.removesuffix(end), ADDED),
        wrote(f"{add.removesuffix(end)}\nDone.", ADDED, "\nDone."),
        wrote(call("{a:'x")[: -len(end)], Call("add", '{"a": "x')),
        wrote(call("{a:1")[: -len(end)], Call("add", '{"a": ')),
        wrote(call("{a:1"), Call("add", '{"a": 1')),
        wrote(call("{a:1]}"), Call("add", '{"a": 1]}')),
        wrote(call("{a 1}"), Call("add", "{a 1}")),
        wrote(call("{a:}") + "So.", Call("add", '{"a": }'), "So."),
        wrote(call("{a:1,}"), Call("add", '{"a": 1, }')),
        wrote_text(call("{a:1}", "other")),
        wrote(call("{a:1}", "other") + add, call("{a:1}", "other"), ADDED),
        wrote_text(f"{begin}call:add"),
        wrote_text(f"Write {begin} and {end}."),
    ]  # fmt: skip


THINKING = [
    wrote(f"<|channel>thought\nI add.\n<channel|>{ADD}", Thought("I add."), ADDED),
    wrote(f"<|channel>thought\n<channel|>{ADD}", ADDED),
    wrote(ADD, ADDED, prompt="<|turn>model\n<|channel>thought\n<channel|>"),
]
TABLES = [
    (None, "gemma", _transcripts("<|tool_call>", "<tool_call|>", '<|"|>')),
    (None, "functiongemma", _transcripts("<start_function_call>", "<end_function_call>", "<escape>")),
    ("gemma", "gemma", THINKING),
]
