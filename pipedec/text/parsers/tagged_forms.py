"""The forms of calls with tagged parameters, one for each family of models that has its own."""

from __future__ import annotations

from dataclasses import replace

from pipedec.text.parsers.tagged_calls import TaggedCalls

QWEN3_CODER = TaggedCalls(
    "qwen3_coder",
    begin="<tool_call>\n",
    call="<function={name}>\n",
    parameter="<parameter={key}>\n",
    end_parameter="\n</parameter>\n",
    end_call="</function>",
    end="\n</tool_call>",
    shown=("<tool_call>", "<function=", "<parameter="),
)
SEED_OSS = TaggedCalls(
    "seed_oss",
    begin="<seed:tool_call>\n",
    call="<function={name}>\n",
    parameter="<parameter={key}>",
    end_parameter="</parameter>\n",
    end_call="</function>",
    end="\n</seed:tool_call>",
    shown=("<seed:tool_call>", "<function="),
)
GLM45 = TaggedCalls(
    "glm45",
    begin="<tool_call>",
    call="{name}\n",
    parameter="<arg_key>{key}</arg_key>\n<arg_value>",
    end_parameter="</arg_value>\n",
    end_call="</tool_call>",
    end="",
    shown=("<tool_call>", "<arg_key>"),
)
GLM47 = TaggedCalls(
    "glm47",
    begin="<tool_call>",
    call="{name}",
    parameter="<arg_key>{key}</arg_key><arg_value>",
    end_parameter="</arg_value>",
    end_call="</tool_call>",
    end="",
    separator="",
    shown=("<tool_call>", "</arg_key><arg_value>"),
)
MINIMAX_M2 = TaggedCalls(
    "minimax_m2",
    begin="<minimax:tool_call>\n",
    call='<invoke name="{name}">\n',
    parameter='<parameter name="{key}">',
    end_parameter="</parameter>\n",
    end_call="</invoke>",
    end="\n</minimax:tool_call>",
    shown=("<minimax:tool_call>", "<invoke name="),
    is_joint=True,
)
DEEPSEEK_V32 = TaggedCalls(
    "deepseek_v32",
    begin="<｜DSML｜function_calls>\n",
    call='<｜DSML｜invoke name="{name}">\n',
    parameter='<｜DSML｜parameter name="{key}" string="{is_string}">',
    end_parameter="</｜DSML｜parameter>\n",
    end_call="</｜DSML｜invoke>",
    end="\n</｜DSML｜function_calls>",
    shown=("｜DSML｜", "function_calls>"),
    is_joint=True,
)
DEEPSEEK_V4 = replace(
    DEEPSEEK_V32,
    name="deepseek_v4",
    begin="<｜DSML｜tool_calls>\n",
    end="\n</｜DSML｜tool_calls>",
    shown=("｜DSML｜", "tool_calls>"),
)
STEP3 = TaggedCalls(
    "step3",
    begin="<｜tool_calls_begin｜>\n",
    call='<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">\n',
    parameter='<steptml:parameter name="{key}">',
    end_parameter="</steptml:parameter>\n",
    end_call="</steptml:invoke><｜tool_call_end｜>",
    end="\n<｜tool_calls_end｜>",
    shown=("<steptml:invoke",),
    is_joint=True,
)
TAGGED_FORMS = (QWEN3_CODER, SEED_OSS, GLM47, GLM45, MINIMAX_M2, DEEPSEEK_V32, DEEPSEEK_V4, STEP3)
