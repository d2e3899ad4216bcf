"""Prose in the public domain: openings of well-known books and speeches in English, which any language model has an opinion on."""

GETTYSBURG = """\
Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived in Liberty, and dedicated to the \
proposition that all men are created equal.

Now we are engaged in a great civil war, testing whether that nation, or any nation so conceived and so dedicated, can long endure. We \
are met on a great battle-field of that war. We have come to dedicate a portion of that field, as a final resting place for those who \
here gave their lives that that nation might live. It is altogether fitting and proper that we should do this.

But, in a larger sense, we can not dedicate -- we can not consecrate -- we can not hallow -- this ground. The brave men, living and \
dead, who struggled here, have consecrated it, far above our poor power to add or detract. The world will little note, nor long remember \
what we say here, but it can never forget what they did here. It is for us the living, rather, to be dedicated here to the unfinished \
work which they who fought here have thus far so nobly advanced. It is rather for us to be here dedicated to the great task remaining \
before us -- that from these honored dead we take increased devotion to that cause for which they gave the last full measure of devotion \
-- that we here highly resolve that these dead shall not have died in vain -- that this nation, under God, shall have a new birth of \
freedom -- and that government of the people, by the people, for the people, shall not perish from the earth.
"""

ALICE = """\
Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once or twice she had peeped \
into the book her sister was reading, but it had no pictures or conversations in it, "and what is the use of a book," thought Alice \
"without pictures or conversations?"

So she was considering in her own mind (as well as she could, for the hot day made her feel very sleepy and stupid), whether the \
pleasure of making a daisy-chain would be worth the trouble of getting up and picking the daisies, when suddenly a White Rabbit with \
pink eyes ran close by her.

There was nothing so very remarkable in that; nor did Alice think it so very much out of the way to hear the Rabbit say to itself, "Oh \
dear! Oh dear! I shall be late!" (when she thought it over afterwards, it occurred to her that she ought to have wondered at this, but \
at the time it all seemed quite natural); but when the Rabbit actually took a watch out of its waistcoat-pocket, and looked at it, and \
then hurried on, Alice started to her feet, for it flashed across her mind that she had never before seen a rabbit with either a \
waistcoat-pocket, or a watch to take out of it, and burning with curiosity, she ran across the field after it, and fortunately was just \
in time to see it pop down a large rabbit-hole under the hedge.

In another moment down went Alice after it, never once considering how in the world she was to get out again.
"""

PRIDE = """\
It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a wife.

However little known the feelings or views of such a man may be on his first entering a neighbourhood, this truth is so well fixed in \
the minds of the surrounding families, that he is considered the rightful property of some one or other of their daughters.

"My dear Mr. Bennet," said his lady to him one day, "have you heard that Netherfield Park is let at last?"

Mr. Bennet replied that he had not.

"But it is," returned she; "for Mrs. Long has just been here, and she told me all about it."

Mr. Bennet made no answer.

"Do you not want to know who has taken it?" cried his wife impatiently.

"You want to tell me, and I have no objection to hearing it."

This was invitation enough.

"Why, my dear, you must know, Mrs. Long says that Netherfield is taken by a young man of large fortune from the north of England; that \
he came down on Monday in a chaise and four to see the place, and was so much delighted with it that he agreed with Mr. Morris \
immediately; that he is to take possession before Michaelmas, and some of his servants are to be in the house by the end of next week."
"""

MOBY_DICK = """\
Call me Ishmael. Some years ago -- never mind how long precisely -- having little or no money in my purse, and nothing particular to \
interest me on shore, I thought I would sail about a little and see the watery part of the world. It is a way I have of driving off the \
spleen and regulating the circulation. Whenever I find myself growing grim about the mouth; whenever it is a damp, drizzly November in \
my soul; whenever I find myself involuntarily pausing before coffin warehouses, and bringing up the rear of every funeral I meet; and \
especially whenever my hypos get such an upper hand of me, that it requires a strong moral principle to prevent me from deliberately \
stepping into the street, and methodically knocking people's hats off -- then, I account it high time to get to sea as soon as I can. \
This is my substitute for pistol and ball. With a philosophical flourish Cato throws himself upon his sword; I quietly take to the ship. \
There is nothing surprising in this. If they but knew it, almost all men in their degree, some time or other, cherish very nearly the \
same feelings towards the ocean with me.

There now is your insular city of the Manhattoes, belted round by wharves as Indian isles by coral reefs -- commerce surrounds it with \
her surf. Right and left, the streets take you waterward. Its extreme downtown is the battery, where that noble mole is washed by waves, \
and cooled by breezes, which a few hours previous were out of sight of land. Look at the crowds of water-gazers there.
"""

DECLARATION = """\
When in the Course of human events, it becomes necessary for one people to dissolve the political bands which have connected them with \
another, and to assume among the powers of the earth, the separate and equal station to which the Laws of Nature and of Nature's God \
entitle them, a decent respect to the opinions of mankind requires that they should declare the causes which impel them to the \
separation.

We hold these truths to be self-evident, that all men are created equal, that they are endowed by their Creator with certain unalienable \
Rights, that among these are Life, Liberty and the pursuit of Happiness. -- That to secure these rights, Governments are instituted \
among Men, deriving their just powers from the consent of the governed, -- That whenever any Form of Government becomes destructive of \
these ends, it is the Right of the People to alter or to abolish it, and to institute new Government, laying its foundation on such \
principles and organizing its powers in such form, as to them shall seem most likely to effect their Safety and Happiness.
"""

PASSAGES = (GETTYSBURG, ALICE, PRIDE, MOBY_DICK, DECLARATION)
QUESTIONS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "List five fruits and the color of each.",
    "Write a Python function that returns the factorial of a number.",
    "What should I pack for a week of hiking in the mountains?",
    "Summarize the plot of Romeo and Juliet.",
    "How many days are there in a leap year, and why?",
)
