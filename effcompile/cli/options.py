"""The arguments and options of the commands, each said once. torch is not imported here: `--help`
is instant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from effcompile.core.effort import Effort

GOAL, HOW, OUTPUT = "The goal", "How to get there", "Output"

ModelFile = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A file that defines `model` and perhaps `inputs` (model.py, model.py:NAME), a folder of "
        "HuggingFace or sentence-transformers, the id of a model in its cache, a .safetensors beside "
        "its config, or a .pt2.",
    ),
]
Task = Annotated[
    str | None,
    typer.Option(
        metavar="TASK",
        help="Of a HuggingFace model: text-classification, text-generation ...",
        rich_help_panel=HOW,
    ),
]
Shape = Annotated[
    str | None,
    typer.Option(
        metavar="BATCHxLENGTH",
        help="Of inputs that are derived: 8x128 (of images: 8x224).",
        rich_help_panel=HOW,
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Run the Python code that a model's folder brings.", rich_help_panel=HOW
    ),
]
AllowPickle = Annotated[
    bool, typer.Option("--allow-pickle", help="Open weights that are a pickle.", rich_help_panel=HOW)
]
PlanFile = Annotated[
    Path, typer.Argument(metavar="PLAN.JSON|DIR", help="A saved plan, or the folder that it is in.")
]
Memory = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Most bytes live during the call or step: 6GiB.", rich_help_panel=GOAL),
]
MaxError = Annotated[
    float | None,
    typer.Option(help="Largest relative L2 error of the output; without it, exact.", rich_help_panel=GOAL),
]
Minimize = Annotated[
    str | None,
    typer.Option(metavar="time|memory", help="What to make least within the limits.", rich_help_panel=GOAL),
]
Mode = Annotated[
    str | None,
    typer.Option(
        metavar="inference|training|generation",
        help="A call, a step, or decoding with a cache.",
        rich_help_panel=GOAL,
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        "--context", metavar="N", help="Generation: tokens of a row, at the most.", rich_help_panel=GOAL
    ),
]
Prompt = Annotated[
    int | None,
    typer.Option(metavar="N", help="Generation: of them in the prompt, for times.", rich_help_panel=GOAL),
]
New = Annotated[
    int | None, typer.Option(metavar="N", help="Generation: of them new, for times.", rich_help_panel=GOAL)
]
Reads = Annotated[
    str | None,
    typer.Option(metavar="all|last", help="Which rows of the logits are read.", rich_help_panel=GOAL),
]
Robust = Annotated[
    bool | None,
    typer.Option(
        "--robust",
        help="The limit on the error holds for scaled, outlying and zero inputs too.",
        rich_help_panel=GOAL,
    ),
]
TargetName = Annotated[
    str,
    typer.Option(
        "--target", help="A machine (see `effcompile targets`) or a .toml file.", rich_help_panel=HOW
    ),
]
BackendName = Annotated[
    str | None,
    typer.Option("--backend", help="Only this backend; otherwise the fastest.", rich_help_panel=HOW),
]
PassNames = Annotated[
    list[str] | None,
    typer.Option(
        "--pass",
        metavar="NAME",
        help="Repeatable: NAME, no-NAME or NAME.OPTION=VALUE; see `effcompile passes`.",
        rich_help_panel=HOW,
    ),
]
Dynamic = Annotated[
    bool | None,
    typer.Option(
        "--dynamic/--static", help="Keep batch and sequence free, or fix every shape.", rich_help_panel=HOW
    ),
]
HowLong = Annotated[
    Effort,
    typer.Option(
        "--effort",
        metavar="low|normal|high",
        help="Search 15, 60 or 600 seconds at the most; high prices every backend in full.",
        rich_help_panel=HOW,
    ),
]
KeepOutputs = Annotated[
    bool,
    typer.Option(
        "--keep-outputs",
        help="Training: return logits too, not the loss alone; takes memory.",
        rich_help_panel=GOAL,
    ),
]
Batch = Annotated[
    str | None,
    typer.Option(
        "--batch",
        metavar="auto|N|N..M",
        help="Training: most examples a second. Generation: rows.",
        rich_help_panel=GOAL,
    ),
]
LearningRate = Annotated[
    str | None,
    typer.Option(
        "--lr",
        metavar="RATE@N",
        help="With --batch: a learning rate good for N examples, 3e-4@256.",
        rich_help_panel=GOAL,
    ),
]
Devices = Annotated[
    int | None,
    typer.Option(
        "--devices",
        help="Training: so many ranks, data-parallel ones without --strategy.",
        rich_help_panel=HOW,
    ),
]
SavedPlan = Annotated[
    Path | None,
    typer.Option("--plan", metavar="FILE", help="Apply this plan; nothing is solved.", rich_help_panel=HOW),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="DIR",
        help="Write plan.json, report.html and the artifact there.",
        rich_help_panel=OUTPUT,
    ),
]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="One row per site, all refusals.", rich_help_panel=OUTPUT)
]
Profile = Annotated[
    bool,
    typer.Option("--profile", help="Say on stderr what each step of planning took.", rich_help_panel=OUTPUT),
]
MANY = "Many devices"
DeviceCount = Annotated[
    str | None,
    typer.Option(
        "--devices",
        metavar="N|auto",
        help="Divide a training step among them; auto: the fewest.",
        rich_help_panel=MANY,
    ),
]
Nodes = Annotated[
    str | None,
    typer.Option("--nodes", metavar="8x8", help="Nodes, and devices of each.", rich_help_panel=MANY),
]
StrategyText = Annotated[
    str | None,
    typer.Option(
        "--strategy",
        metavar="dp=8,tp=8",
        help="What is given; what is left out is free.",
        rich_help_panel=MANY,
    ),
]
GlobalBatch = Annotated[
    int | None,
    typer.Option("--global-batch", min=1, help="Sequences of one step on all devices.", rich_help_panel=MANY),
]
BatchTokens = Annotated[
    int | None, typer.Option("--batch-tokens", min=1, help="The same in tokens.", rich_help_panel=MANY)
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.", rich_help_panel=OUTPUT)]
