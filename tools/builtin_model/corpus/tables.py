"""The small world that the built-in model knows: what can be asked, and what can be named."""

from __future__ import annotations


def _pairs(text: str) -> dict[str, str]:
    """`a: b` lines and `;`-separated entries as a mapping, in order."""
    entries = (entry.strip() for entry in text.replace("\n", ";").split(";"))
    parted = (entry.partition(": ") for entry in entries if entry)
    return {left: right for left, _, right in parted}


def _words(text: str) -> tuple[str, ...]:
    """Comma-separated entries, in order, each once."""
    entries = (entry.strip() for entry in text.replace("\n", ",").split(","))
    return tuple(dict.fromkeys(entry for entry in entries if entry))


CAPITALS = _pairs("""
    France: Paris; Italy: Rome; Spain: Madrid; Germany: Berlin; Portugal: Lisbon; Greece: Athens
    Austria: Vienna; Poland: Warsaw; Hungary: Budapest; Sweden: Stockholm; Norway: Oslo
    Finland: Helsinki; Denmark: Copenhagen; Ireland: Dublin; England: London; Scotland: Edinburgh
    Belgium: Brussels; the Netherlands: Amsterdam; Switzerland: Bern; Romania: Bucharest
    Bulgaria: Sofia; Croatia: Zagreb; Serbia: Belgrade; Ukraine: Kyiv; Russia: Moscow
    Turkey: Ankara; Iceland: Reykjavik; Estonia: Tallinn; Latvia: Riga; Lithuania: Vilnius
    Japan: Tokyo; China: Beijing; India: New Delhi; Thailand: Bangkok; Vietnam: Hanoi
    South Korea: Seoul; Indonesia: Jakarta; Nepal: Kathmandu; Mongolia: Ulaanbaatar; Iran: Tehran
    Iraq: Baghdad; Qatar: Doha; Lebanon: Beirut; Jordan: Amman; Egypt: Cairo; Kenya: Nairobi
    Morocco: Rabat; Ghana: Accra; Nigeria: Abuja; Senegal: Dakar; Tunisia: Tunis; Ethiopia: Addis Ababa
    Canada: Ottawa; Mexico: Mexico City; Cuba: Havana; Brazil: Brasilia; Argentina: Buenos Aires
    Chile: Santiago; Peru: Lima; Colombia: Bogota; Uruguay: Montevideo; Ecuador: Quito
    Australia: Canberra; New Zealand: Wellington; Fiji: Suva
""")

CONTINENTS = _pairs("""
    France: Europe; Italy: Europe; Spain: Europe; Germany: Europe; Portugal: Europe; Greece: Europe
    Austria: Europe; Poland: Europe; Sweden: Europe; Norway: Europe; Finland: Europe; Ireland: Europe
    Japan: Asia; China: Asia; India: Asia; Thailand: Asia; Vietnam: Asia; South Korea: Asia
    Nepal: Asia; Mongolia: Asia; Iran: Asia; Iraq: Asia; Egypt: Africa; Kenya: Africa; Morocco: Africa
    Ghana: Africa; Nigeria: Africa; Senegal: Africa; Tunisia: Africa; Ethiopia: Africa
    Canada: North America; Mexico: North America; Cuba: North America; Brazil: South America
    Argentina: South America; Chile: South America; Peru: South America; Colombia: South America
    Uruguay: South America; Ecuador: South America
""")

LANGUAGES = _pairs("""
    France: French; Italy: Italian; Spain: Spanish; Germany: German; Portugal: Portuguese
    Greece: Greek; Poland: Polish; Hungary: Hungarian; Sweden: Swedish; Norway: Norwegian
    Finland: Finnish; Denmark: Danish; England: English; the Netherlands: Dutch; Romania: Romanian
    Russia: Russian; Turkey: Turkish; Iceland: Icelandic; Japan: Japanese; China: Chinese
    Thailand: Thai; Vietnam: Vietnamese; South Korea: Korean; Egypt: Arabic; Mexico: Spanish
    Brazil: Portuguese; Argentina: Spanish; Australia: English; Austria: German; Iran: Persian
""")

OPPOSITES = _pairs("""
    hot: cold; big: small; tall: short; fast: slow; old: young; rich: poor; happy: sad; hard: soft
    light: dark; full: empty; wet: dry; open: closed; up: down; left: right
    day: night; black: white; good: bad; early: late; loud: quiet; strong: weak; clean: dirty
    near: far; high: low; thick: thin; wide: narrow; deep: shallow; sweet: sour; brave: cowardly
    kind: cruel; true: false; first: last; inside: outside; above: below; before: after; always: never
    begin: end; push: pull; win: lose; buy: sell; give: take; laugh: cry; love: hate; remember: forget
    arrive: leave; build: destroy; rise: fall; accept: refuse; ask: answer; float: sink
    awake: asleep; alive: dead; sharp: blunt; smooth: rough; simple: complex; cheap: expensive
    safe: dangerous; calm: nervous; polite: rude; lazy: busy; wise: foolish; guilty: innocent
    friend: enemy; summer: winter; north: south; east: west; morning: evening; question: reply
    success: failure; war: peace; more: less; many: few; same: different; male: female
""")

COLOURS_OF = _pairs("""
    the sky: blue; grass: green; snow: white; blood: red; the sun: yellow; coal: black; a banana: yellow
    a lemon: yellow; a carrot: orange; a tomato: red; a strawberry: red; milk: white; chocolate: brown
    a frog: green; an elephant: grey; a polar bear: white; a flamingo: pink; a raven: black
    the sea: blue; a leaf in spring: green; a ripe cherry: red; an orange: orange; a pumpkin: orange
    a cucumber: green; a swan: white; a crow: black; a pea: green; an emerald: green; a ruby: red
    a sapphire: blue; gold: yellow; silver: grey; ash: grey; honey: golden; wood: brown; salt: white
    sugar: white; the night sky: black; a lobster when cooked: red; spinach: green; a plum: purple
    an eggplant: purple; lavender: purple; a mouse: grey; a piglet: pink; butter: yellow; a chick: yellow
    sand: yellow; a cloud: white; a fire engine: red
""")

SOUNDS = _pairs("""
    dog: barks; cat: meows; cow: moos; sheep: bleats; horse: neighs; pig: grunts; duck: quacks
    lion: roars; wolf: howls; bee: buzzes; snake: hisses; frog: croaks; owl: hoots; bird: sings
    hen: clucks; mouse: squeaks; donkey: brays; elephant: trumpets; crow: caws; turkey: gobbles
    dove: coos; bear: growls; cricket: chirps; goose: honks; rooster: crows
""")

YOUNG = _pairs("""
    dog: puppy; cat: kitten; cow: calf; sheep: lamb; horse: foal; pig: piglet; duck: duckling
    lion: cub; goat: kid; hen: chick; frog: tadpole; kangaroo: joey; deer: fawn; swan: cygnet
    goose: gosling; owl: owlet; hare: leveret; eagle: eaglet; butterfly: caterpillar; human: baby
""")

HOMES = _pairs("""
    bee: a hive; bird: a nest; dog: a kennel; spider: a web; horse: a stable; fox: a den; rabbit: a burrow
    lion: a den; bear: a cave; cow: a barn; pig: a sty; beaver: a lodge; ant: an anthill; fish: water
    snail: a shell; eagle: an eyrie; squirrel: a tree; king: a castle; monk: a monastery; sailor: a ship
""")

LEGS = _pairs("""
    dog: four; cat: four; spider: eight; bird: two; ant: six; bee: six; snake: no; fish: no; horse: four
    human: two; octopus: no; crab: ten; cow: four; duck: two; fly: six; worm: no; frog: four; hen: two
    elephant: four; butterfly: six
""")

MAKERS = _pairs("""
    bread: a baker; a house: a builder; a chair: a carpenter; a painting: a painter; a book: a writer
    a song: a composer; a suit: a tailor; a shoe: a shoemaker; honey: a bee; milk: a cow; wool: a sheep
    an egg: a hen; silk: a silkworm; a clock: a clockmaker; a pot: a potter; a meal: a cook
    a web: a spider; a dam: a beaver; a photograph: a photographer; a horseshoe: a blacksmith
""")

USES = _pairs("""
    a knife: cutting; a pen: writing; a broom: sweeping; an oven: baking; a bed: sleeping
    a needle: sewing; a spoon: eating soup; a ladder: climbing; a boat: sailing; a key: opening locks
    a lamp: giving light; a clock: telling time; an umbrella: keeping dry; a shovel: digging
    a hammer: driving nails; a saw: sawing wood; a brush: painting; a kettle: boiling water
    a telescope: looking at stars; a thermometer: measuring heat; a comb: combing hair
    soap: washing; a camera: taking pictures; a map: finding the way; a ruler: measuring length
""")

QUESTIONS = _pairs("""
    How many days are in a week?: seven; How many months are in a year?: twelve
    How many hours are in a day?: twenty-four; How many minutes are in an hour?: sixty
    How many seconds are in a minute?: sixty; How many letters are in the alphabet?: twenty-six
    How many sides does a triangle have?: three; How many sides does a square have?: four
    How many wheels does a bicycle have?: two; How many wheels does a car have?: four
    How many fingers are on one hand?: five; How many eggs are in a dozen?: twelve
    How many seasons are in a year?: four; How many planets go around the sun?: eight
    How many continents are there?: seven; How many strings does a violin have?: four
    Which planet do we live on?: Earth; Which planet is the largest?: Jupiter
    Which planet is known for its rings?: Saturn; Which planet is closest to the sun?: Mercury
    Which planet is called the red planet?: Mars; Which star is closest to the Earth?: the sun
    What is frozen water called?: ice; What do bees make?: honey; What do we breathe?: air
    What is the largest ocean?: the Pacific; What is the longest river?: the Nile
    What is the highest mountain?: Mount Everest; What is the largest animal?: the blue whale
    What is the fastest animal on land?: the cheetah; What is the tallest animal?: the giraffe
    What is the largest desert?: the Sahara; What is the king of animals?: the lion
    What is the first month of the year?: January; What is the last month of the year?: December
    What is the first letter of the alphabet?: A; What is the last letter of the alphabet?: Z
    What season comes after winter?: spring; What season comes after summer?: autumn
    What season comes after spring?: summer; What season comes after autumn?: winter
    What do cows give us to drink?: milk; What falls from clouds?: rain; What do plants need to grow?: light
    What colour do you get from blue and yellow?: green; What colour do you get from red and yellow?: orange
    What colour do you get from red and blue?: purple; What colour do you get from black and white?: grey
""")

DAYS = _words("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday")
MONTHS = _words("""
    January, February, March, April, May, June, July, August, September, October, November, December
""")

NAMES = _words("""
    Ana, Ben, Clara, David, Emma, Felix, Grace, Henry, Iris, Jack, Kate, Leo, Mia, Noah, Olga, Paul
    Rosa, Sam, Tina, Victor, Wendy, Yara, Zoe, Adam, Bella, Carl, Diana, Eric, Fiona, George, Hanna
    Ivan, Julia, Karl, Laura, Martin, Nina, Oscar, Petra, Quinn, Robert, Sara, Tom, Ursula, Vera
    Walter, Alice, Boris, Cora, Dylan, Elsa, Frank, Gina, Hugo, Ida, Jonas, Klara, Lukas, Maria
    Nils, Olivia, Peter, Rita, Simon, Thea, Anton, Bruno, Cecilia, Daniel, Eva, Fatima, Gustav
    Helena, Ismail, Jana, Kevin, Lena, Max, Nora, Omar, Pia, Rafael, Sofie, Theo, Amir, Beatrice
    Chen, Dora, Emil, Freya, Hassan, Ines, Jamal, Kenji, Lucia, Mateo, Naomi, Otto, Priya, Ravi
    Selma, Tariq, Uma, Yusuf, Zara, Arthur, Blanca, Casper, Elena, Finn, Greta, Igor, Joan, Kira
    Liam, Mona, Niko, Ruth, Stefan, Tess, Viktor, Willa, Abel, Brigit, Cyrus, Edith, Flora, Gerald
    Hilda, Jasper, Kim, Lydia, Magnus, Nadia, Orla, Philip, Rachel, Sven, Tamara, Urban, Violet
    James, Mary, John, Linda, Michael, Susan, William, Karen, Richard, Lisa, Joseph, Nancy, Thomas
    Betty, Charles, Sandra, Mark, Ashley, Steven, Emily, Andrew, Donna, Joshua, Michelle, Brian, Amanda
    Bob, Anna, Lucy, Harry, Ella, Jim, Amy, Ted, Jane, Luis, Carmen, Diego, Pedro, Juan, Carlos, Sofia
""")

CITIES = _words("""
    Paris, Rome, Madrid, Berlin, Lisbon, Athens, Vienna, Warsaw, Oslo, Dublin, London, Tokyo, Cairo
    Lima, Boston, Chicago, Seattle, Denver, Dallas, Toronto, Sydney, Munich, Hamburg, Milan, Naples
    Turin, Porto, Seville, Lyon, Nice, Zurich, Geneva, Prague, Krakow, Bergen, Malmo, Leeds, Bristol
    Oxford, York, Glasgow, Cork, Antwerp, Ghent, Utrecht, Delft, Osaka, Kyoto, Mumbai, Delhi, Lagos
    Accra, Nairobi, Dakar, Havana, Bogota, Quito, Santiago, Austin, Houston, Miami, Atlanta, Portland
    Phoenix, Detroit, Vancouver, Montreal, Calgary, Perth, Brisbane, Auckland, Salzburg, Basel, Bonn
    Cologne, Dresden, Leipzig, Stuttgart, Verona, Pisa, Florence, Venice, Valencia, Granada, Tampere
    Odense, Aarhus, Tartu, Kaunas, Split, Varna, Izmir, Haifa, Doha, Amman, Tunis, Rabat, Riga, Seoul
    Helsinki, Stockholm, Copenhagen, Budapest, Moscow, Beijing, Amsterdam, Brussels, Edinburgh
    New York, San Francisco, Los Angeles, Cape Town, Buenos Aires, Mexico City, New Delhi
""")

JOBS = _words("""
    doctor, teacher, baker, nurse, farmer, painter, pilot, writer, cook, carpenter, plumber, singer
    lawyer, dentist, driver, gardener, tailor, sailor, librarian, mechanic, potter, shepherd
    dancer, clerk, judge, waiter, builder, fisherman, postman, scientist, photographer, translator
""")
FOODS = _words("""
    pizza, soup, rice, bread, cheese, pasta, salad, fish, cake, chocolate, apples, pancakes, noodles
    curry, potatoes, beans, ice cream, honey, eggs, sushi, dumplings, tacos, olives, mushrooms
    strawberries, porridge, lentils, waffles, popcorn, grapes
""")
COLOURS = _words("""
    red, blue, green, yellow, orange, purple, pink, brown, black, white, grey, gold, silver, turquoise
""")
HOBBIES = _words("""
    chess, tennis, swimming, painting, cooking, football, reading, singing, hiking, cycling, fishing
    dancing, gardening, skiing, sailing, knitting, running, climbing, drawing, photography, yoga
    basketball, surfing, baking, juggling
""")
ANIMALS = _words("""
    fox, dog, cat, bear, wolf, rabbit, mouse, owl, frog, horse, lion, tiger, elephant, monkey, duck
    goat, hedgehog, squirrel, badger, otter, hare, crow, turtle, penguin, whale, dolphin, eagle, deer
    mole, beaver, donkey, sheep, pig, hen, swan, parrot, camel, giraffe, zebra, seal, snail, bee
    dragon, sparrow, goose, raccoon, panda, koala, kangaroo, lizard
""")
FRUITS = _words("""
    apple, banana, cherry, grape, lemon, orange, peach, pear, plum, mango, melon, kiwi, fig, lime
    apricot, strawberry, raspberry, pineapple, papaya, blueberry
""")
VEGETABLES = _words("""
    carrot, onion, potato, tomato, cucumber, pumpkin, pea, bean, leek, spinach, cabbage, lettuce
    pepper, garlic, beetroot, celery, radish, broccoli, turnip, corn
""")
OBJECTS = _words("""
    lamp, chair, table, book, clock, bag, coat, hat, cup, phone, bicycle, guitar, umbrella, camera
    knife, pillow, mirror, blanket, kettle, ladder, radio, carpet, basket, candle, vase, drum, pen
    wallet, watch, scarf, tent, shovel, bucket, violin, laptop, desk, sofa, bowl, spoon, ring
""")
INSTRUMENTS = _words("piano, violin, guitar, drum, flute, trumpet, harp, cello, organ, clarinet")
ROOMS = _words("""
    kitchen, bedroom, bathroom, garage, hall, living room, office, cellar, attic, garden
""")
PLACES = _words("""
    forest, village, castle, river, mountain, island, garden, valley, lake, desert, harbour, meadow
    mill, cave, town, lighthouse, field, swamp, farm, bridge
""")
TRAITS = _words("""
    brave, kind, clever, lazy, shy, curious, lonely, proud, honest, greedy, patient, hungry, sleepy
    tiny, old, young, careful, cheerful, grumpy, gentle
""")
PETS = _words("dog, cat, rabbit, parrot, hamster, horse, turtle, goldfish, pony, ferret")

PLURALS = {"mouse": "mice", "sheep": "sheep", "goose": "geese", "wolf": "wolves", "deer": "deer"}


def plural(noun: str) -> str:
    """The plural of a noun of these tables."""
    if noun in PLURALS:
        return PLURALS[noun]
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    if noun.endswith(("s", "x", "ch", "sh", "tomato", "potato", "mango")):
        return noun + "es"
    return noun + "s"


def a(noun: str) -> str:
    """The noun with its indefinite article."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"
