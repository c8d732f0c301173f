"""Names, places, numbers, clock times, dates and prices in English and German, and sentences with slots for them.

Every function of VALUES draws a pair (English, German) without a preposition: the sentences bring it ("at {time}", "um
{time}"). A slot with a 2 ({name2}) is a second value, {name:f} and {name:m} fix the gender.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

from noun_phrases import read_lines, read_rows

Value = tuple[str, str]


def split_words(text: str) -> list[str]:
    return text.split()


ENGLISH_ONES = split_words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
    " eighteen nineteen"
)
GERMAN_ONES = split_words(
    "null eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn siebzehn"
    " achtzehn neunzehn"
)
ENGLISH_TENS = split_words(". . twenty thirty forty fifty sixty seventy eighty ninety")
GERMAN_TENS = split_words(". . zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig")
ENGLISH_DAYS = split_words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
GERMAN_DAYS = split_words("Montag Dienstag Mittwoch Donnerstag Freitag Samstag Sonntag")
ENGLISH_MONTHS = split_words("January February March April May June July August September October November December")
GERMAN_MONTHS = split_words("Januar Februar März April Mai Juni Juli August September Oktober November Dezember")
MONTH_DAYS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
ENGLISH_ORDINALS = {1: "first", 2: "second", 3: "third", 5: "fifth", 8: "eighth", 9: "ninth", 12: "twelfth"}
GERMAN_ORDINALS = {1: "ersten", 3: "dritten", 7: "siebten", 8: "achten"}
# German says "auf Malta", not "in Malta".
ISLANDS = {
    *split_words("Malta Cyprus Cuba Jamaica Haiti Barbados Grenada Dominica Mauritius Fiji Tonga Samoa Nauru Palau"),
    *split_words("Madagascar Greenland Kiribati Tuvalu Vanuatu"),
    *("Cape Verde", "Puerto Rico", "Saint Lucia", "Sri Lanka"),
}
TIMES_OF_DAY = (("morning", "morgens", 4, 11), ("afternoon", "nachmittags", 1, 5), ("evening", "abends", 6, 11))
CURRENCIES = (("euros", "€", "Euro"), ("euros", "€", "Euro"), ("dollars", "$", "Dollar"), ("pounds", "£", "Pfund"))
OTHER_CURRENCIES = (("Swiss francs", "Schweizer Franken"), ("yen", "Yen"), ("rupees", "Rupien"), ("crowns", "Kronen"))
CENTS = (10, 20, 25, 50, 75, 80, 90, 95, 99)
# Sounds of invented names.
ONSETS = split_words("b br d dr f g gr h j k kl l m n p pr r s sh st t th tr v w z b d k l m n r s t v")
CODAS = split_words("k l m n r s t x nd rt lk sk th ck")
ENDINGS = {
    "city": split_words("a o in burg ville ton sk ar en os ford um"),
    "country": split_words("ia a an land stan"),
    "surname": split_words("er ov ski son ek ini ez ell mann ard wick o"),
    "f": split_words("a i e ina elle ora is"),
    "m": CODAS,
    "": split_words("a o it en u ix y"),
}


class Slots:
    """Draws values, and fills the sentences of slots.tsv with them."""

    def __init__(self, folder: Path, invented: float = 0.5) -> None:
        self.invented = invented
        self.first_names = read_rows(folder / "first_names.tsv")
        self.surnames = read_lines(folder / "surnames.txt")
        rows = [row for row in read_rows(folder / "places.tsv") if len(row) > 2]
        self.cities = [(row[0], row[1]) for row in rows if row[2] == "city"]
        self.countries = [
            (row[0], row[1])
            for row in rows
            if row[2] == "country"
            and not row[3]
            and " and " not in row[0]
            and not row[0].startswith("the ")
            and row[0] not in ISLANDS
        ]
        # Cities with a German name of their own have to be learned one by one.
        self.renamed_cities = [city for city in self.cities if city[0] != city[1]]
        self.sentences = [line.split(" ||| ") for line in read_lines(folder / "slots.tsv")]

    def list_renamed_places(self) -> dict[str, str]:
        """Cities and countries of one word with a German name of their own, but those that are names of people too."""
        people = {row[0] for row in self.first_names} | set(self.surnames)
        renamed = {english: german for english, german in self.cities + self.countries if english != german}
        return {english: german for english, german in renamed.items() if english.isalpha() and english not in people}

    def draw(self, rng: random.Random) -> Value:
        """A random sentence with its slots filled, the same on both sides."""
        english, german = rng.choice(self.sentences)
        values: dict[str, Value] = {}
        for slot in dict.fromkeys(re.findall(r"\{[^}]*\}", english)):
            for _ in range(50):
                values[slot] = self.draw_value(slot, rng, english)
                if sum(value == values[slot] for value in values.values()) == 1:
                    break
        if "{year2}" in values and values["{year}"] > values["{year2}"]:
            values["{year}"], values["{year2}"] = values["{year2}"], values["{year}"]
        for slot, (english_value, german_value) in values.items():
            english = english.replace(slot, english_value)
            german = replace_german_slot(german, slot, german_value)
        english = re.sub(r"([ap]\.m\.)\.", r"\1", english)
        return english[0].upper() + english[1:], german[0].upper() + german[1:]

    def draw_value(self, slot: str, rng: random.Random, english: str) -> Value:
        kind, _, gender = slot[1:-1].partition(":")
        kind = kind.rstrip("2")
        invented = {
            "name": self.invented,
            "surname": self.invented,
            "city": self.invented / 2,
            "country": self.invented / 3,
        }
        if rng.random() < invented.get(kind, 0.0):
            return (invent_name(gender if kind == "name" else kind, rng),) * 2
        match kind:
            case "name":
                return (self.draw_first_name(gender, rng),) * 2
            case "surname":
                return (rng.choice(self.surnames),) * 2
            case "city":
                return self.draw_city(rng)
            case "country":
                return rng.choice(self.countries)
            case "year" if re.search(r"\bwill\b|'ll\b|is retiring|next|budget", english):
                return make_year(rng, 2026, 2060)
        return VALUES[kind](rng)

    def draw_city(self, rng: random.Random) -> Value:
        return rng.choice(self.renamed_cities if rng.random() < 0.5 else self.cities)

    def draw_name(self, rng: random.Random, gender: str = "") -> str:
        """A first name; some are invented."""
        return invent_name(gender, rng) if rng.random() < self.invented else self.draw_first_name(gender, rng)

    def draw_first_name(self, gender: str, rng: random.Random) -> str:
        while True:
            name, own = rng.choice(self.first_names)
            if gender in ("", own):
                return name


def replace_german_slot(german: str, slot: str, value: str) -> str:
    """Replace a slot: Anna's is Annas, but Hans' and Alice'; "der erste Mai", but "am ersten Mai"."""
    if re.search(r"(s|ß|x|z|ce)$", value):
        german = german.replace(f"{slot}s ", f"{value}' ")
    if slot.startswith("{date") and value[0].isalpha():
        german = re.sub(rf"\b([Dd]er) {re.escape(slot)}", rf"\1 {value.replace('en ', 'e ', 1)}", german)
    return german.replace(slot, value)


def invent_name(kind: str, rng: random.Random) -> str:
    """A name that hardly exists, such as Velora or Brankit; `kind` is a gender, city, country or surname."""
    syllables = (
        rng.choice(ONSETS) + rng.choice("aaeeiioou") + (rng.choice("lnr") if rng.random() < 0.25 else "")
        for _ in range(rng.choice((1, 2, 2)))
    )
    stem, ending = "".join(syllables), rng.choice(ENDINGS[kind])
    if stem[-1] in "aeiou" and ending[0] in "aeiouy":
        stem += rng.choice(CODAS[:7])
    elif stem[-1] not in "aeiou" and ending[0] not in "aeiouy":
        stem += rng.choice("aaeeiioou")
    return (stem + ending).capitalize()


def english_words(n: int) -> str:
    """Return a number below 1,000 in words: 73 is seventy-three."""
    if n >= 100:
        return f"{ENGLISH_ONES[n // 100]} hundred" + (f" and {english_words(n % 100)}" if n % 100 else "")
    if n < 20:
        return ENGLISH_ONES[n]
    return ENGLISH_TENS[n // 10] + (f"-{ENGLISH_ONES[n % 10]}" if n % 10 else "")


def german_words(n: int) -> str:
    """Return a number below 1,000 in words: 73 is dreiundsiebzig."""
    if n >= 100:
        hundreds = GERMAN_ONES[n // 100] if n >= 200 else "ein"
        return f"{hundreds}hundert" + (german_words(n % 100) if n % 100 else "")
    if n < 20:
        return GERMAN_ONES[n]
    ones = "ein" if n % 10 == 1 else GERMAN_ONES[n % 10]
    return (f"{ones}und" if n % 10 else "") + GERMAN_TENS[n // 10]


def make_number(rng: random.Random) -> Value:
    n = rng.choice((rng.randint(2, 12), rng.randint(13, 99), rng.randint(13, 99), rng.randint(100, 999)))
    # 101 is both hunderteins and hundertein.
    if rng.random() < 0.35 and n % 100 != 1:
        return english_words(n), german_words(n)
    return str(n), str(n)


def make_large_number(rng: random.Random) -> Value:
    n = rng.randint(1001, 9999) * rng.choice((1, 1, 10, 100, 1000))
    if rng.random() < 0.4:
        n = rng.randint(2, 99) * 10 ** rng.randint(3, 5)
    return f"{n:,}", f"{n:,}".replace(",", ".")


def make_decimal(rng: random.Random) -> Value:
    text = f"{rng.randint(1, 120) / 10:.1f}" if rng.random() < 0.7 else f"{rng.randint(101, 1999) / 100:.2f}"
    return text, text.replace(".", ",")


def make_percent(rng: random.Random) -> Value:
    n = rng.randint(2, 99)
    form = rng.random()
    if form < 0.2:
        return f"{english_words(n)} percent", f"{german_words(n)} Prozent"
    english, german = make_decimal(rng) if form < 0.4 else (str(n), str(n))
    return (f"{english}%", f"{german} %") if rng.random() < 0.5 else (f"{english} percent", f"{german} Prozent")


def make_year(rng: random.Random, first: int = 1900, last: int = 2024) -> Value:
    year = rng.randint(first, last)
    if rng.random() < 0.05 and 1911 <= year < 2000 and year % 100 > 9:
        return f"nineteen {english_words(year % 100)}", f"neunzehnhundert{german_words(year % 100)}"
    return str(year), str(year)


def make_phone(rng: random.Random) -> Value:
    pattern = rng.choice(
        ("0### #######", "+49 ### ######", "555-####", "+44 20 #### ####", "01##/#######", "###-###-####")
    )
    return (re.sub("#", lambda _: str(rng.randrange(10)), pattern),) * 2


def make_weekday(rng: random.Random) -> Value:
    return rng.choice(list(zip(ENGLISH_DAYS, GERMAN_DAYS, strict=True)))


def make_month(rng: random.Random) -> Value:
    return rng.choice(list(zip(ENGLISH_MONTHS, GERMAN_MONTHS, strict=True)))


def make_time(rng: random.Random) -> Value:
    """A clock time: half past three is halb vier, 7:45 p.m. is 19:45 Uhr."""
    form, hour = rng.random(), rng.randint(1, 12)
    german_hour = "ein" if hour == 1 else german_words(hour)
    if form < 0.06:
        return rng.choice((("noon", "zwölf Uhr mittags"), ("noon", "12 Uhr mittags"), ("midnight", "Mitternacht")))
    if form < 0.42:
        return make_spoken_time(rng, hour)
    if form < 0.54:
        return f"{english_words(hour)} o'clock", f"{german_hour} Uhr"
    if form < 0.58:
        return f"{hour} o'clock", f"{hour} Uhr"
    if form < 0.66:
        part, german_part, first, last = rng.choice(TIMES_OF_DAY)
        hour = rng.randint(first, last)
        german_hour = "ein" if hour == 1 else german_words(hour)
        clock = rng.choice(("", " o'clock"))
        return f"{english_words(hour)}{clock} in the {part}", f"{german_hour} Uhr {german_part}"
    if form < 0.70:
        minutes = rng.choice((10, 15, 20, 40, 45, 50))
        return f"{english_words(hour)} {english_words(minutes)}", f"{german_hour} Uhr {german_words(minutes)}"
    if form < 0.92:
        return make_half_day_time(rng, hour)
    hour, minutes = rng.randint(0, 23), 5 * rng.randint(1, 11)
    return f"{hour}:{minutes:02d}", f"{hour}:{minutes:02d} Uhr"


def make_spoken_time(rng: random.Random, hour: int) -> Value:
    """Half, a quarter, or minutes past and to an hour."""
    following, article = hour % 12 + 1, rng.choice(("", "a "))
    now, then = (english_words(each) for each in (hour, following))
    german_now, german_then = (german_words(each) for each in (hour, following))
    match rng.choice((5, 10, 15, 15, 20, 25, 30, 30, 30, 35, 40, 45, 45, 50, 55)):
        case 30:
            return rng.choice((f"half past {now}", f"{now} thirty")), f"halb {german_then}"
        case 15:
            return f"{article}quarter past {now}", f"Viertel nach {german_now}"
        case 45:
            return f"{article}quarter to {then}", f"Viertel vor {german_then}"
        case 25:
            return f"twenty-five past {now}", f"fünf vor halb {german_then}"
        case 35:
            return f"twenty-five to {then}", f"fünf nach halb {german_then}"
        case minutes if minutes < 30:
            return f"{english_words(minutes)} past {now}", f"{german_words(minutes)} nach {german_now}"
        case minutes:
            return f"{english_words(60 - minutes)} to {then}", f"{german_words(60 - minutes)} vor {german_then}"


def make_half_day_time(rng: random.Random, hour: int) -> Value:
    """A time with a.m. or p.m."""
    afternoon = rng.random() < 0.5
    mark = rng.choice((" p.m.", " p.m.", " pm", " PM", "pm") if afternoon else (" a.m.", " a.m.", " am", " AM", "am"))
    german_hour = hour % 12 + 12 * afternoon
    if rng.random() < 0.35:
        return f"{hour}{mark}", f"{german_hour} Uhr"
    minutes = rng.choice((5 * rng.randint(1, 11), rng.randint(1, 59)))
    return f"{hour}:{minutes:02d}{mark}", f"{german_hour}:{minutes:02d} Uhr"


def make_date(rng: random.Random) -> Value:
    """A day, as after "on" and "am"."""
    month = rng.randrange(12)
    day, english, german = rng.randint(1, MONTH_DAYS[month]), ENGLISH_MONTHS[month], GERMAN_MONTHS[month]
    if rng.random() < 0.25:
        ordinal, german_ordinal = make_ordinal(day)
        return rng.choice((f"the {ordinal} of {english}", f"{english} {ordinal}")), f"{german_ordinal} {german}"
    ordinal = f"{day}{'th' if 10 < day < 14 else {1: 'st', 2: 'nd', 3: 'rd'}.get(day % 10, 'th')}"
    text = rng.choice((f"{english} {ordinal}", f"{english} {day}", f"{day} {english}", f"the {ordinal} of {english}"))
    if rng.random() < 0.25 and (day, english) != (29, "February"):
        year = rng.randint(1950, 2027)
        return f"{text}{', ' if text.startswith(english) else ' '}{year}", f"{day}. {german} {year}"
    return text, f"{day}. {german}"


def make_ordinal(n: int) -> Value:
    """Return first and ersten: the German word has the ending that follows am, vom and den."""
    tens = n // 10 * 10 if n > 20 and n % 10 else 0
    ones = n - tens
    english = ENGLISH_ORDINALS.get(ones) or (
        f"{ENGLISH_ONES[ones]}th" if ones < 20 else f"{ENGLISH_TENS[n // 10][:-1]}ieth"
    )
    german = f"{german_words(n)}sten" if n > 19 else GERMAN_ORDINALS.get(n, f"{german_words(n)}ten")
    return (f"{ENGLISH_TENS[tens // 10]}-" if tens else "") + english, german


def make_price(rng: random.Random) -> Value:
    """A price, never of one: $4.50 is 4,50 $ or 4,50 Dollar."""
    form = rng.random()
    plural, sign, german = rng.choice(CURRENCIES)
    n, cents = rng.choice((rng.randint(2, 30), rng.randint(2, 99), 10 * rng.randint(2, 99))), rng.choice(CENTS)
    if form < 0.06:
        return rng.choice((f"{cents} cents", f"{english_words(cents)} cents")), f"{cents} Cent"
    if form < 0.12:
        plural, german = rng.choice(OTHER_CURRENCIES)
        return f"{n} {plural}", f"{n} {german}"
    if form < 0.27 and n % 100 != 1:
        return f"{english_words(n)} {plural}", f"{german_words(n)} {german}"
    if form < 0.33 and plural != "pounds":
        n = rng.randint(2, 20)
        return (
            f"{english_words(n)} {plural} {english_words(cents)}",
            f"{german_words(n)} {german} {german_words(cents)}",
        )
    large = rng.random() < 0.1
    n = rng.randint(10, 480) * 100 + rng.choice((0, 50)) if large else n
    amount = f"{n:,}" + ("" if large or rng.random() < 0.4 else f".{cents:02d}")
    german_amount = amount.translate(str.maketrans(",.", ".,"))
    german_price = rng.choice((f"{german_amount} {sign}", f"{german_amount} {german}"))
    return (f"{sign}{amount}" if rng.random() < 0.75 else f"{amount} {plural}"), german_price


VALUES: dict[str, Callable[[random.Random], Value]] = {
    "number": make_number,
    "bignumber": make_large_number,
    "decimal": make_decimal,
    "percent": make_percent,
    "year": make_year,
    "phone": make_phone,
    "weekday": make_weekday,
    "month": make_month,
    "time": make_time,
    "date": make_date,
    "price": make_price,
}
