"""Requests in people's own words, written by hand: no generator made them and none is trained on."""

from dataclasses import dataclass

from tools.train.tasks.tools.schema import Call, Parameter, Tool, render_calls, tools_message
from tools.train.tasks.wording import EMPTY_THOUGHT, TOOLS_TAIL

WEATHER = Tool(
    "get_weather",
    "Get the weather forecast for a city.",
    (
        Parameter("city", "string", "The name of the city."),
        Parameter("days", "integer", "Number of days to forecast.", required=False),
    ),
)
READ = Tool("read_file", "Read a file.", (Parameter("path", "string", "The path of the file."),))
WRITE = Tool(
    "write_file",
    "Write text to a file.",
    (Parameter("path", "string", "The path of the file."), Parameter("content", "string", "The text to write.")),
)
EDIT = Tool(
    "edit",
    "Replace a string in a file.",
    (
        Parameter("file_path", "string", "The file to modify."),
        Parameter("old_string", "string", "The text to replace."),
        Parameter("new_string", "string", "The text to replace it with."),
    ),
)
BASH = Tool("bash", "Run a shell command.", (Parameter("command", "string", "The command to run."),))
GREP = Tool(
    "grep",
    "Search file contents with a regular expression.",
    (
        Parameter("pattern", "string", "The regular expression to search for."),
        Parameter("path", "string", "The directory to search in.", required=False),
    ),
)
GLOB = Tool("glob", "Find files that match a pattern.", (Parameter("pattern", "string", "The glob pattern."),))
FETCH = Tool("web_fetch", "Fetch a web page.", (Parameter("url", "string", "The address of the page."),))
TODO = Tool("todo_add", "Add an entry to the list of tasks.", (Parameter("task", "string", "What is to be done."),))
STOCK = Tool("stock_price", "Look up the price of a share.", (Parameter("symbol", "string", "The ticker symbol."),))
ALARM = Tool("set_alarm", "Set an alarm.", (Parameter("time", "string", "Time of day as HH:MM."),))
PIZZA = Tool(
    "order_pizza",
    "Order a pizza.",
    (Parameter("size", "string", "", choices=("small", "medium", "large")), Parameter("count", "integer", "How many.")),
)
AGENT = (READ, WRITE, EDIT, BASH, GREP, GLOB)


@dataclass(frozen=True, slots=True)
class Probe:
    user: str
    tools: tuple[Tool, ...]
    calls: tuple[Call, ...]

    def prompt(self) -> str:
        """As the chat template writes it, without a system message of its own, with an empty think block."""
        system = tools_message([tool.json_line() for tool in self.tools], TOOLS_TAIL)
        return (
            f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{self.user}<|im_end|>\n"
            f"<|im_start|>assistant\n{EMPTY_THOUGHT}"
        )

    def answer(self) -> str:
        return render_calls(self.calls)


def call(tool: Tool, **arguments: str) -> Call:
    return Call(tool.name, tuple(arguments.items()))


PROBES = (
    Probe("What is the weather in Paris for 5 days?", (WEATHER,), (call(WEATHER, city="Paris", days="5"),)),
    Probe("What's the weather like in Berlin today?", (WEATHER, STOCK), (call(WEATHER, city="Berlin"),)),
    Probe("I'm flying to Oslo. Tell me the weather there.", (READ, WEATHER), (call(WEATHER, city="Oslo"),)),
    Probe("Weather for Lisbon, next 3 days", (WEATHER, TODO), (call(WEATHER, city="Lisbon", days="3"),)),
    Probe("Read /src/main.py", (READ,), (call(READ, path="/src/main.py"),)),
    Probe("Read /src/main.py", AGENT, (call(READ, path="/src/main.py"),)),
    Probe("Please have a look at config/settings.toml.", AGENT, (call(READ, path="config/settings.toml"),)),
    Probe("Can you show me what's inside README.md?", (BASH, READ, GREP), (call(READ, path="README.md"),)),
    Probe("open the file docs/guide.md for me", (WRITE, READ), (call(READ, path="docs/guide.md"),)),
    Probe("Run the command `pytest -q`.", AGENT, (call(BASH, command="pytest -q"),)),
    Probe("Could you please run git status?", (READ, BASH), (call(BASH, command="git status"),)),
    Probe("Execute ls -la", (GREP, GLOB, BASH), (call(BASH, command="ls -la"),)),
    Probe('Search for "def main" in src', AGENT, (call(GREP, pattern="def main", path="src"),)),
    Probe("Where is the function parse_args used?", (READ, GREP), (call(GREP, pattern="parse_args"),)),
    Probe("Find all Python files matching **/*.py", AGENT, (call(GLOB, pattern="**/*.py"),)),
    Probe(
        'In app.py, replace "port = 80" with "port = 8080".',
        AGENT,
        (call(EDIT, file_path="app.py", old_string="port = 80", new_string="port = 8080"),),
    ),
    Probe(
        "Create the file hello.py with this content:\n\nprint('hello')\nprint('world')",
        AGENT,
        (call(WRITE, path="hello.py", content="print('hello')\nprint('world')"),),
    ),
    Probe(
        "Write a file notes.txt that says:\n\n```\nbuy milk\n```",
        (READ, WRITE),
        (call(WRITE, path="notes.txt", content="buy milk"),),
    ),
    Probe("Get https://example.com/index.html", (READ, FETCH), (call(FETCH, url="https://example.com/index.html"),)),
    Probe("Put 'water the plants' on my list", (TODO, ALARM), (call(TODO, task="water the plants"),)),
    Probe("How much is a share of NVDA?", (WEATHER, STOCK), (call(STOCK, symbol="NVDA"),)),
    Probe("Wake me up at 06:30", (WEATHER, ALARM, TODO), (call(ALARM, time="06:30"),)),
    Probe("I'd like two large pizzas", (PIZZA, ALARM), (call(PIZZA, size="large", count="2"),)),
    Probe(
        "Read setup.py and then run make test",
        AGENT,
        (call(READ, path="setup.py"), call(BASH, command="make test")),
    ),
    Probe(
        "What is the weather in Rome, and what does TSLA cost?",
        (STOCK, WEATHER),
        (call(WEATHER, city="Rome"), call(STOCK, symbol="TSLA")),
    ),
    Probe("Read a.txt and b.txt", (READ, WRITE), (call(READ, path="a.txt"), call(READ, path="b.txt"))),
)
