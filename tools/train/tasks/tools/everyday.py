"""Tools of assistants: fixed ones whose wording no template yields."""

from tools.train.tasks.tools import values
from tools.train.tasks.tools.role import Role, Skill

CITY = Role(
    "city",
    ("city", "location", "place", "town"),
    ("The city", "Name of the city", "Where", "The city and maybe the country", ""),
    values.city,
)
DAYS = Role(
    "days",
    ("days", "num_days", "forecast_days", "n_days"),
    ("Number of days", "How many days", "Days of the forecast", ""),
    values.small_number,
    "integer",
    optional=True,
)
UNIT = Role(
    "unit",
    ("unit", "units", "temperature_unit", "scale"),
    ("The unit of the temperature", "Unit to use"),
    lambda source: values.same(source.rng.choice(UNIT.choices)),
    choices=("celsius", "fahrenheit", "kelvin"),
    optional=True,
)
FORMULA = Role(
    "formula",
    ("expression", "formula", "calculation", "expr"),
    ("The expression to evaluate", "What to calculate", ""),
    values.expression,
)
TO = Role(
    "to",
    ("to", "recipient", "email", "address", "to_address"),
    ("Who gets it", "The email address of the recipient", ""),
    values.email,
)
SUBJECT = Role(
    "subject",
    ("subject", "title", "topic", "heading"),
    ("The subject line", "What the mail is about", ""),
    values.topic,
    style="quoted",
)
BODY = Role(
    "body",
    ("body", "message", "text", "content"),
    ("The text of the mail", "What to say", ""),
    values.sentence,
    style="quoted",
)
MINUTES = Role(
    "minutes",
    ("minutes", "duration", "duration_minutes", "time_in_minutes"),
    ("How many minutes", "Length in minutes", ""),
    values.small_number,
    "integer",
)
AMOUNT = Role("amount", ("amount", "value", "sum"), ("How much", "The amount to convert", ""), values.number, "integer")
BASE = Role(
    "base",
    ("from", "from_currency", "source_currency", "base"),
    ("The currency to convert from", "Code of the first currency"),
    values.currency,
)
TARGET = Role(
    "target",
    ("to", "to_currency", "target_currency", "quote"),
    ("The currency to convert to", "Code of the second currency"),
    values.currency,
)
TEXT = Role(
    "text", ("text", "sentence", "phrase", "q"), ("The text", "What to translate", ""), values.sentence, style="quoted"
)
LANGUAGE = Role(
    "language",
    ("language", "target_language", "to", "lang"),
    ("The language to translate into", "Target language", ""),
    values.language,
)
ROOM = Role("room", ("room", "where", "location", "area"), ("Which room", "The room", ""), values.label)
SWITCH = Role(
    "on", ("on", "state", "turn_on", "enabled"), ("Whether it shall be on", "True for on"), values.label, "boolean"
)
EVENT = Role(
    "event",
    ("title", "event", "name", "summary"),
    ("What it is", "Title of the event", ""),
    values.topic,
    style="quoted",
)
DATE = Role("date", ("date", "day", "on_date", "when"), ("The date", "Day as YYYY-MM-DD", ""), values.date)
TIME = Role(
    "time",
    ("time", "start_time", "at", "hour"),
    ("The time of day", "When it starts"),
    values.time_of_day,
    optional=True,
)
PERSON = Role("person", ("person", "contact", "name", "who"), ("Who", "Name of the contact", ""), values.person)

EVERYDAY = (
    Skill(
        "weather",
        ("get_weather", "weather", "weather_forecast", "get_forecast", "getWeather", "current_weather", "forecast"),
        (
            "Get the weather forecast for a city.",
            "Returns the weather of a place for some days.",
            "Weather forecast.",
            "Tells how the weather will be.",
        ),
        (CITY, DAYS, UNIT),
        (
            "what is the weather in {city}?",
            "what's the weather like in {city}?",
            "how is the weather in {city}?",
            "will it rain in {city}?",
            "weather in {city}",
            "what will the weather in {city} be for the next {days} days?",
            "give me the forecast for {city} for {days} days",
            "how will the weather be in {city} over the next {days} days?",
            "show me a {days} day forecast for {city}",
            "I need the weather in {city} in {unit}",
            "what is the temperature in {city} in {unit}?",
            "tell me the weather for {days} days in {city}",
            "get the weather in {city} for {days} days in {unit}",
            "is it warm in {city}?",
            "do I need an umbrella in {city}?",
            "what is the weather in {city} for {days} days?",
        ),
    ),
    Skill(
        "calculator",
        ("calculate", "calculator", "evaluate", "compute", "math"),
        ("Evaluate an arithmetic expression.", "A calculator.", "Computes the value of a formula."),
        (FORMULA,),
        (
            "calculate {formula}",
            "compute {formula}",
            "what does {formula} give?",
            "work out {formula}",
            "use the calculator for {formula}",
            "how much is {formula}?",
        ),
    ),
    Skill(
        "email",
        ("send_email", "email", "send_mail", "mail", "compose_email"),
        ("Send an email.", "Sends a mail to somebody.", "Write and send a message by email."),
        (TO, SUBJECT, BODY),
        (
            "send an email to {to} with subject {subject} saying {body}",
            "email {to} about {subject}: {body}",
            "write to {to}, subject {subject}, text {body}",
            "mail {body} to {to} under the subject {subject}",
            "send {to} a mail titled {subject} with the text {body}",
            "tell {to} by email: {body}. Subject: {subject}",
        ),
    ),
    Skill(
        "timer",
        ("set_timer", "start_timer", "timer", "countdown"),
        ("Set a timer.", "Starts a countdown.", "Rings after some minutes."),
        (MINUTES,),
        (
            "set a timer for {minutes} minutes",
            "start a {minutes} minute timer",
            "wake me in {minutes} minutes",
            "count down {minutes} minutes",
            "ring in {minutes} minutes",
            "I need a timer of {minutes} minutes",
        ),
    ),
    Skill(
        "currency",
        ("convert_currency", "exchange", "currency_converter", "convert_money"),
        ("Convert money between currencies.", "Currency conversion.", "Exchanges an amount into another currency."),
        (AMOUNT, BASE, TARGET),
        (
            "convert {amount} {base} to {target}",
            "how much is {amount} {base} in {target}?",
            "what are {amount} {base} in {target}?",
            "change {amount} {base} into {target}",
            "I have {amount} {base}, how many {target} is that?",
            "exchange {amount} {base} for {target}",
        ),
    ),
    Skill(
        "translate",
        ("translate", "translate_text", "translator", "translation"),
        ("Translate text into another language.", "Translates a sentence.", "Machine translation."),
        (TEXT, LANGUAGE),
        (
            "translate {text} into {language}",
            "translate {text} to {language}",
            "how do you say {text} in {language}?",
            "what is {text} in {language}?",
            "say {text} in {language}",
            "put {text} into {language}",
        ),
    ),
    Skill(
        "light",
        ("set_light", "light", "switch_light", "control_lights", "lamp"),
        ("Turn the light of a room on or off.", "Switches lights.", "Controls the lamps at home."),
        (ROOM, SWITCH),
        (
            "turn on the light in the {room}{on=true}",
            "turn the {room} light on{on=true}",
            "I want light in the {room}{on=true}",
            "make it bright in the {room}{on=true}",
            "turn off the light in the {room}{on=false}",
            "turn the {room} light off{on=false}",
            "make it dark in the {room}{on=false}",
            "I want no light in the {room}{on=false}",
        ),
    ),
    Skill(
        "calendar",
        ("create_event", "add_event", "calendar_add", "schedule_event", "new_appointment"),
        ("Create an event in the calendar.", "Adds an appointment.", "Puts an event on the calendar."),
        (EVENT, DATE, TIME),
        (
            "add {event} on {date}",
            "add {event} on {date} at {time}",
            "schedule {event} for {date}",
            "put {event} in my calendar on {date} at {time}",
            "I have {event} on {date}, put it in the calendar",
            "create an event {event} on {date}",
            "on {date} at {time} there is {event}",
        ),
    ),
    Skill(
        "phone",
        ("call_contact", "phone_call", "make_call", "dial", "ring_up"),
        ("Call somebody by phone.", "Starts a phone call.", "Dials the number of a contact."),
        (PERSON,),
        (
            "call {person}",
            "phone {person}",
            "ring {person} up",
            "I want to talk to {person}",
            "give {person} a call",
            "dial the number of {person}",
        ),
    ),
)
