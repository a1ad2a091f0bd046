"""The tools of coding agents beside files: shell, web, git, tasks."""

from tools.train.tasks.tools import values
from tools.train.tasks.tools.coding_files import FILE
from tools.train.tasks.tools.role import Role, Skill

COMMAND = Role(
    "command",
    ("command", "cmd", "script", "command_line"),
    ("The command to execute", "The shell command to run", "Command line", ""),
    values.command,
    style="last",
)
URL = Role(
    "url",
    ("url", "link", "address", "uri"),
    ("The URL to fetch", "Address of the page", "A fully formed URL", ""),
    values.url,
)
SEARCH = Role(
    "query",
    ("query", "q", "search_query", "terms", "keywords"),
    ("The search query", "What to search for", "Words to search the web for", ""),
    values.topic,
    style="last",
)
TASK = Role(
    "task",
    ("task", "todo", "item", "content", "title", "description"),
    ("The task to add", "What has to be done", "Text of the todo item", ""),
    values.sentence,
    style="last",
)
TASKS = Role(
    "tasks",
    ("todos", "items", "tasks", "entries"),
    ("The items of the list", "A list of tasks", "What has to be done, one entry each"),
    values.word_items,
    "array",
    style="last",
)
BRANCH = Role(
    "branch", ("branch", "branch_name", "name", "ref"), ("The branch", "Name of the git branch", ""), values.branch
)
MESSAGE = Role(
    "message",
    ("message", "commit_message", "msg", "summary"),
    ("The commit message", "What the commit does", ""),
    values.sentence,
    style="quoted",
)
SNIPPET = Role(
    "code",
    ("code", "source", "script", "program"),
    ("The Python code to run", "Code to execute", ""),
    values.code_block,
    style="block",
)
NOTE = Role(
    "note",
    ("note", "fact", "text", "memory", "content"),
    ("What to remember", "The text of the note", ""),
    values.sentence,
    style="last",
)
PROMPT = Role(
    "prompt",
    ("prompt", "task", "instructions", "description"),
    ("What the agent shall do", "The task for the agent", ""),
    values.sentence,
    style="last",
)
FLAG_BACKGROUND = Role(
    "background",
    ("background", "run_in_background", "is_background"),
    ("Run without waiting for the end", "Whether to run in the background"),
    values.label,
    "boolean",
    optional=True,
)

WORK_SKILLS = (
    Skill(
        "shell",
        (
            "bash",
            "run_command",
            "shell",
            "execute_command",
            "terminal",
            "run_shell",
            "Bash",
            "exec",
            "run_terminal_cmd",
        ),
        (
            "Execute a shell command.",
            "Runs a command in the terminal and returns its output.",
            "Run a bash command.",
            "Execute a command line on the user's machine.",
        ),
        (COMMAND, FLAG_BACKGROUND),
        (
            "run {command}",
            "execute {command}",
            "run the command {command}",
            "run this: {command}",
            "in the terminal, run {command}",
            "what does {command} print?",
            "what is the output of {command}?",
            "use the shell to run {command}",
            "execute this command: {command}",
            "I want to know what {command} gives",
            "start {command}",
            "try {command}",
            "call {command} in a shell",
            "run in the background{background=true}: {command}",
            "start this in the background{background=true}: {command}",
        ),
    ),
    Skill(
        "fetch page",
        ("web_fetch", "fetch_url", "fetch", "WebFetch", "download_page", "open_url", "browse"),
        (
            "Fetch the content of a web page.",
            "Downloads a URL and returns its text.",
            "Get a page from the web.",
        ),
        (URL,),
        (
            "fetch {url}",
            "open {url}",
            "get {url}",
            "download {url}",
            "read the page {url}",
            "what does the page {url} say?",
            "what is on {url}?",
            "get me the text of {url}",
            "load the web page {url}",
            "look at {url}",
            "visit {url}",
        ),
    ),
    Skill(
        "search web",
        ("web_search", "search_web", "WebSearch", "google", "internet_search", "search_internet"),
        ("Search the web.", "Searches the internet and returns results.", "Find web pages about something."),
        (SEARCH,),
        (
            "search the web for {query}",
            "search the internet for {query}",
            "look up {query} on the web",
            "google {query}",
            "find web pages about {query}",
            "search online for {query}",
            "what does the internet say about {query}?",
            "do a web search: {query}",
            "find out online about {query}",
        ),
    ),
    Skill(
        "todo",
        ("add_todo", "todo_add", "create_task", "add_task", "todo"),
        ("Add an item to the todo list.", "Creates a new task.", "Put something on the list of things to do."),
        (TASK,),
        (
            "add a todo: {task}",
            "add {task} to my todo list",
            "put {task} on the todo list",
            "new task: {task}",
            "remind me to do this: {task}",
            "note a task: {task}",
            "I have to do this: {task}",
            "create a task {task}",
        ),
    ),
    Skill(
        "todo list",
        ("todo_write", "write_todos", "set_todos", "TodoWrite", "update_plan"),
        ("Write the list of todos.", "Sets the task list of this session.", "Record the plan as a list of steps."),
        (TASKS,),
        (
            "the plan is: {tasks}",
            "write down these todos: {tasks}",
            "make a todo list of {tasks}",
            "set the todo list to {tasks}",
            "plan these steps: {tasks}",
            "these are the tasks: {tasks}",
        ),
    ),
    Skill(
        "commit",
        ("git_commit", "commit", "commit_changes", "GitCommit"),
        ("Commit the staged changes.", "Creates a git commit.", "Record changes in the repository."),
        (MESSAGE,),
        (
            "commit with the message {message}",
            "commit this as {message}",
            "make a commit {message}",
            "commit the changes: {message}",
            "git commit, message {message}",
            "record the changes as {message}",
        ),
    ),
    Skill(
        "checkout",
        ("git_checkout", "checkout", "switch_branch", "change_branch"),
        ("Switch to another git branch.", "Checks out a branch.", "Changes the current branch."),
        (BRANCH,),
        (
            "switch to {branch}",
            "switch to the branch {branch}",
            "check out {branch}",
            "change to the branch {branch}",
            "go to branch {branch}",
            "I want to work on the branch {branch}",
        ),
    ),
    Skill(
        "run tests",
        ("run_tests", "test", "pytest", "run_test_file"),
        ("Run the tests of a file.", "Runs the test suite.", "Executes tests and reports failures."),
        (FILE,),
        (
            "run the tests in {path}",
            "test {path}",
            "do the tests in {path} pass?",
            "run the test file {path}",
            "check whether {path} passes its tests",
            "execute the tests of {path}",
        ),
    ),
    Skill(
        "python",
        ("python", "run_python", "execute_code", "code_interpreter", "eval_python"),
        ("Run Python code.", "Executes Python and returns what it prints.", "A Python interpreter."),
        (SNIPPET,),
        (
            "run this Python code:{code}",
            "execute this:{code}",
            "what does this code print?{code}",
            "run the following in Python:{code}",
            "evaluate this program:{code}",
            "try this code:{code}",
        ),
    ),
    Skill(
        "memory",
        ("save_memory", "remember", "add_note", "memorize", "store_fact"),
        ("Remember something for later.", "Saves a note to long-term memory.", "Stores a fact about the user."),
        (NOTE,),
        (
            "remember this: {note}",
            "remember {note}",
            "keep in mind: {note}",
            "note that {note}",
            "make a note: {note}",
            "do not forget: {note}",
            "save this for later: {note}",
        ),
    ),
    Skill(
        "agent",
        ("task", "launch_agent", "spawn_agent", "delegate", "sub_agent"),
        ("Start another agent for a task.", "Delegates work to a sub-agent.", "Launches an agent."),
        (PROMPT,),
        (
            "let an agent do this: {prompt}",
            "start an agent for this: {prompt}",
            "delegate this: {prompt}",
            "have a sub-agent work on {prompt}",
            "launch an agent with the task {prompt}",
            "ask another agent: {prompt}",
        ),
    ),
)
