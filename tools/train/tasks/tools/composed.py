"""Made-up tools described in natural words: a verb, a noun and one to three meanings of parameters.

No two are alike, so the model must read names and descriptions rather than know its tools.
"""

from dataclasses import dataclass, replace

from tools.train.tasks.source import Source
from tools.train.tasks.tools import values
from tools.train.tasks.tools.everyday import CITY, DATE, DAYS, LANGUAGE, PERSON
from tools.train.tasks.tools.held_out import Holdout, split
from tools.train.tasks.tools.role import Role, Skill
from tools.train.tasks.wording import listed


@dataclass(frozen=True, slots=True)
class Action:
    """A kind of verb: its words in names, in descriptions, and whole requests with {noun} and, last, {rest}."""

    names: tuple[str, ...]
    described: tuple[str, ...]
    requests: tuple[str, ...]


GET = Action(
    ("get", "fetch", "find", "lookup", "show", "query", "check", "read", "retrieve", "list"),
    ("Get the {}", "Returns the {}", "Look up the {}", "Fetches the {}", "Find the {}", "Tells the {}", "Shows the {}"),
    (
        "what is the {noun}{rest}?",
        "show me the {noun}{rest}",
        "get the {noun}{rest}",
        "I need the {noun}{rest}",
        "give me the {noun}{rest}",
        "find the {noun}{rest}",
        "look up the {noun}{rest}",
        "tell me the {noun}{rest}",
        "what's the {noun}{rest}?",
        "do you know the {noun}{rest}?",
        "I want to know the {noun}{rest}",
        "check the {noun}{rest}",
        "I would like to see the {noun}{rest}",
        "could I have the {noun}{rest}?",
        "let me see the {noun}{rest}",
        "fetch the {noun}{rest}",
    ),
)
CREATE = Action(
    ("create", "add", "make", "new", "register", "open", "start"),
    ("Create a {}", "Adds a {}", "Makes a new {}", "Registers a {}", "Open a new {}"),
    (
        "create a {noun}{rest}",
        "add a {noun}{rest}",
        "make a new {noun}{rest}",
        "I want a new {noun}{rest}",
        "open a {noun}{rest}",
        "set up a {noun}{rest}",
        "register a {noun}{rest}",
        "start a {noun}{rest}",
        "we need another {noun}{rest}",
    ),
)
DELETE = Action(
    ("delete", "remove", "cancel", "drop", "clear"),
    ("Delete the {}", "Removes a {}", "Cancels a {}", "Drops the {}"),
    (
        "delete the {noun}{rest}",
        "remove the {noun}{rest}",
        "cancel the {noun}{rest}",
        "get rid of the {noun}{rest}",
        "I no longer want the {noun}{rest}",
        "drop the {noun}{rest}",
    ),
)
SEND = Action(
    ("send", "share", "post", "publish", "submit"),
    ("Send a {}", "Sends the {}", "Shares the {}", "Publish a {}"),
    (
        "send the {noun}{rest}",
        "send a {noun}{rest}",
        "share the {noun}{rest}",
        "post the {noun}{rest}",
        "publish the {noun}{rest}",
        "submit a {noun}{rest}",
    ),
)
BOOK = Action(
    ("book", "order", "reserve", "buy", "request"),
    ("Book a {}", "Orders a {}", "Reserve a {}", "Buys a {}"),
    (
        "book a {noun}{rest}",
        "order a {noun}{rest}",
        "reserve a {noun}{rest}",
        "I want to book a {noun}{rest}",
        "I would like a {noun}{rest}",
        "buy a {noun}{rest}",
    ),
)
ACTIONS = (GET, CREATE, DELETE, SEND, BOOK)
ACTION_WEIGHTS = (52, 14, 11, 11, 12)

NOUNS = listed(
    "stock price,flight status,population,invoice,ticket,playlist,recipe,news,train schedule,bus line,traffic,"
    "hotel,restaurant,table,meeting room,order status,delivery,package,account balance,bank statement,"
    "transaction,payment,tax rate,salary,customer,employee,project,task board,issue,pull request,release,"
    "deployment,server status,log file,database table,schema,backup,metric,alert,dashboard,user profile,"
    "password,api key,session,device,sensor,humidity,air quality,water level,energy use,tide,sunrise,"
    "moon phase,earthquake,horoscope,lottery result,football score,match result,movie,song,album,book,author,"
    "poem,quote,joke,word meaning,synonym,map,route,distance,parking spot,taxi,rental car,bike,boat,museum,"
    "concert,festival,holiday,school,course,lesson,exam result,homework,doctor,medicine,blood test,vaccine,"
    "diet plan,workout,step count,heart rate,sleep report,product,price list,discount,coupon,warranty,review,"
    "rating,survey,report,chart,document,contract,letter,photo,video,podcast,newsletter,blog post,comment,"
    "time zone,address",
    ",",
)

EMAIL = Role("email", ("email", "recipient", "to", "address"), ("The email address", "Who gets it"), values.email)
LIMIT = Role(
    "limit",
    ("limit", "max_results", "count", "n", "top_k"),
    ("How many to return", "Maximum number of results", "Number of entries"),
    values.small_number,
    "integer",
    optional=True,
)
NUMBER_ID = Role(
    "id", ("id", "number", "reference", "code", "identifier"), ("The id", "Its number", "Which one"), values.identity
)
TOPIC = Role(
    "topic",
    ("topic", "subject", "query", "keyword", "about"),
    ("The topic", "What it is about"),
    values.topic,
    style="quoted",
)
CATEGORY = Role("category", ("category", "type", "kind", "genre"), ("The category", "Which kind"), values.label)
HOST = Role("host", ("host", "server", "machine", "hostname"), ("The host", "Which server"), values.label)
TITLE = Role(
    "title", ("title", "name", "label", "caption"), ("Its title", "What to call it"), values.topic, style="quoted"
)
PRICE = Role(
    "price",
    ("max_price", "price", "budget", "limit_usd"),
    ("The highest price in dollars", "How much it may cost"),
    values.number,
    "integer",
    optional=True,
)
PEOPLE = Role(
    "people",
    ("people", "guests", "persons", "party_size"),
    ("How many people", "Number of guests"),
    values.small_number,
    "integer",
)
FORMAT = Role(
    "format",
    ("format", "output_format", "as", "file_type"),
    ("The format of the result", "Which format to use"),
    lambda source: values.same(source.rng.choice(FORMAT.choices)),
    choices=("json", "csv", "pdf", "text"),
    optional=True,
)
PRIORITY = Role(
    "priority",
    ("priority", "urgency", "level", "severity"),
    ("How urgent it is", "The priority"),
    lambda source: values.same(source.rng.choice(PRIORITY.choices)),
    choices=("low", "medium", "high"),
    optional=True,
)
DETAIL = Role(
    "detail",
    ("detailed", "verbose", "full", "include_details"),
    ("Whether to give all details", "Long or short answer"),
    values.label,
    "boolean",
    optional=True,
)
ROLE_PHRASES: tuple[tuple[Role, tuple[str, ...]], ...] = (
    (CITY, ("in {city}", "for {city}", "at {city}", "near {city}", "around {city}", "of {city}")),
    (DATE, ("on {date}", "for {date}", "of {date}", "as of {date}", "dated {date}")),
    (
        DAYS,
        (
            "for {days} days",
            "for the next {days} days",
            "over {days} days",
            "of the last {days} days",
            "within {days} days",
        ),
    ),
    (PERSON, ("for {person}", "of {person}", "belonging to {person}", "with {person}", "made by {person}")),
    (LANGUAGE, ("in {language}", "written in {language}", "in the language {language}", "using {language}")),
    (EMAIL, ("to {email}", "for {email}", "and mail it to {email}", "to the address {email}")),
    (
        LIMIT,
        ("with at most {limit} entries", "limited to {limit}", "but only {limit} of them", "up to {limit} results"),
    ),
    (NUMBER_ID, ("with the id {id}", "number {id}", "with number {id}", "{id}", "called {id}", "of {id}")),
    (TOPIC, ("about {topic}", "on {topic}", "on the topic {topic}", "that deals with {topic}", "concerning {topic}")),
    (
        CATEGORY,
        ("of the category {category}", "in the category {category}", "of type {category}", "of the kind {category}"),
    ),
    (HOST, ("on {host}", "from {host}", "of the server {host}", "on the host {host}", "at the machine {host}")),
    (TITLE, ("with the title {title}", "titled {title}", "named {title}", "under the name {title}")),
    (
        PRICE,
        (
            "for less than {price} dollars",
            "under {price} dollars",
            "for at most {price} dollars",
            "below {price} dollars",
        ),
    ),
    (PEOPLE, ("for {people} people", "for {people}", "for {people} persons", "for a group of {people}")),
    (FORMAT, ("as {format}", "in {format} format", "as a {format} file", "formatted as {format}")),
    (
        PRIORITY,
        ("with {priority} priority", "at {priority} priority", "with the priority {priority}", "ranked {priority}"),
    ),
    (
        DETAIL,
        (
            "in detail{detail=true}",
            "with all details{detail=true}",
            "with everything there is to say{detail=true}",
            "in short{detail=false}",
            "without details{detail=false}",
            "just briefly{detail=false}",
        ),
    ),
)
DESCRIPTION_ENDS = ("", " for a given {}", " by {}", ", chosen by its {}", " of a {}")
REQUEST_COUNT = 6


def draw_action(source: Source) -> Action:
    return source.rng.choices(ACTIONS, ACTION_WEIGHTS)[0]


def draw_noun(source: Source) -> str:
    form = source.rng.random()
    if form < 0.6:
        return source.rng.choice(NOUNS)
    return source.word() if form < 0.9 else source.pseudo_word()


def composed_skill(source: Source, action: Action, about: str, holdout: Holdout) -> Skill:
    """A new skill about a noun; its phrasings are all of the training or all of the held-out part."""
    rng = source.rng
    chosen = rng.sample(ROLE_PHRASES, rng.choices((1, 2, 3), (35, 42, 23))[0])
    # at least the first is required, and required ones come first, as people write schemas
    roles = [replace(role, optional=role.optional and index > 0) for index, (role, _) in enumerate(chosen)]
    roles.sort(key=lambda role: role.optional)
    phrases = {role.key: split(role_phrases, holdout.phrasings) for role, role_phrases in chosen}
    requests = split(action.requests, holdout.phrasings)

    phrasings: list[str] = []
    for _ in range(REQUEST_COUNT):
        said = [role for role in roles if not role.optional or source.chance(0.6)]
        rng.shuffle(said)
        rest = "".join(" " + rng.choice(phrases[role.key]) for role in said)
        phrasings.append(rng.choice(requests).replace("{noun}", about).replace("{rest}", rest))
    words = about.replace(" ", "_")
    verb = rng.choice(action.names)
    camel = verb + "".join(part.capitalize() for part in about.split())
    described = rng.choice(action.described).format(about) + rng.choice(DESCRIPTION_ENDS).format(roles[0].names[0])
    return Skill(
        topic=f"{action.names[0]} {about}",
        names=(f"{verb}_{words}", f"{verb}_{words}", camel, f"{words}_{verb}", words),
        descriptions=(described, described + "."),
        roles=tuple(roles),
        phrasings=tuple(phrasings),
    )
