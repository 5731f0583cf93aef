"""Answers that look right and are wrong, and the other way round, by kind: gold, right ones, wrong ones.

The verdicts were written down before the rules that give them. The answers are separated by " ~ ".
"""

# ruff: noqa: E501, RUF001 - a gold and its answers stand in one line; the characters are part of the forms

from __future__ import annotations

KINDS: dict[str, list[tuple[str, str, str]]] = {
    "exact small numbers": [
        (r"\frac{1}{2^{55}}", r"\boxed{\frac{1}{2^{55}}} ~ \boxed{2^{-55}}", r"\boxed{\frac{1}{2^{56}}} ~ 0"),
        ("3^{-40}", r"\boxed{\frac{1}{3^{40}}}", r"\boxed{5^{-40}}"),
        (r"\left(\frac56\right)^{200}", r"\boxed{\frac{5^{200}}{6^{200}}}", r"\boxed{\left(\frac56\right)^{199}}"),
        (r"\frac{1}{20!}", r"\boxed{1/20!}", r"\boxed{\frac{1}{21!}}"),
        (r"2-\frac{1}{2^{2023}}", r"\boxed{2-2^{-2023}}", r"\boxed{2-\frac{1}{2^{2022}}} ~ 2"),
        ("e^{-50}", r"\boxed{\frac{1}{e^{50}}}", r"\boxed{e^{-51}} ~ 0"),
        (r"\sqrt{5+2\sqrt6}", r"\boxed{\sqrt2+\sqrt3} ~ 3.146264", r"\boxed{\sqrt2+2} ~ 3.1462"),
        ("0", r"\boxed{(\sqrt2+\sqrt3)^2-5-2\sqrt6}", r"\boxed{10^{-30}}"),
    ],
    "thinking": [
        ("72", "<think>71?</think>72 ~ <think>\\boxed{71}</think>\\boxed{72} ~ 71?</think>\n\n**72**",
         "<think>So \\boxed{72}.</think>\n\nThe final answer is **71**. ~ <think>\\boxed{72}</think>\n71"
         " ~ <think>maybe \\boxed{72} ~ <think>maybe \\boxed{72}</think> I do not know. ~ <think>72"),
    ],
    "words that deny or change": [
        ("5", r"\boxed{\text{total of }5}",
         r"\boxed{\text{all real numbers except }5} ~ \boxed{\text{anything but }5} ~ \boxed{\text{excluding }5}"
         r" ~ \boxed{\text{without }5} ~ \boxed{\text{none of }5} ~ \boxed{\text{no }5} ~ \boxed{5\text{ is wrong}}"
         r" ~ \boxed{\text{divisible by }5} ~ \boxed{\text{exceeds }5} ~ \boxed{\text{square of }5}"
         r" ~ \boxed{\text{the cube of }5} ~ \boxed{\text{above }5} ~ \boxed{\text{below }5} ~ \boxed{\text{multiples of }5}"
         r" ~ \boxed{\text{powers of }5} ~ \boxed{\text{all but }5} ~ \boxed{5\text{ less}} ~ \boxed{\text{other than }5}"),
        (r"\text{all real numbers except }5", r"\boxed{\text{all real numbers except }5}", "5"),
        (r"\text{multiples of }6", r"\boxed{\text{multiples of 6}}", "6"),
    ],
    "all options": [
        ("A", r"\boxed{(A) 1} ~ \boxed{A. f(B)}",
         r"\boxed{(A) 1 (B) 2 (C) 3} ~ \boxed{A. B. C} ~ \boxed{(A)(B)(C)(D)(E)} ~ \boxed{A. 1 B. 2}"),
        ("B", "<answer>B) x</answer>", r"\boxed{(B) 12, (C) 15} ~ <answer>B) x or C) y</answer>"),
        ("(D) both (A) and (B)", r"D ~ \boxed{D}", "A ~ B"),
    ],
    "hedges": [
        ("6", "It is 6. ~ Of 5 or more cases, 6", "<answer>5 or maybe 6</answer> ~ <answer>either 5 or 6</answer>"
         " ~ #### either 5 or 6 ~ <answer>one of 4, 5, 6</answer> ~ Either 5 or 6."),
        ("5", "The answer is 5, which could be more.",
         "The answer is both 5 and 6. ~ The answer is 5, maybe 6. ~ The answer is 5, but it could be 6."
         " ~ The answer is 5; alternatively 6. ~ The answer is 5 as well as 6. ~ The answer is from 5 to 6."
         " ~ The answer is 5. Or 6."),
        ("B", "The answer is (B). ~ The answer is B, as 5 are left. ~ The answer is B because C is wrong.",
         "The answer is (B), (C). ~ The answer is (B) (C). ~ The answer is (B)/(C). ~ The answer is B, perhaps C."
         " ~ The answer is B (maybe C). ~ B is wrong. The answer is C. ~ The answer is B is wrong."),
        ("I", "The answer is I. ~ The answer is I because 5 are left.", "The answer is I don't know. ~ Hm, the answer is I don't know."),
        ("A", "The answer is A. ~ The answer is A because 5 are left. ~ The answer is A since it is.",
         "The answer is A mystery to me. ~ I tried. The answer is A mystery to me."),
    ],
    "denied numbers in prose": [
        ("5", "It is 5. ~ It is not 4 but 5. ~ He has more than he had: 5",
         "It is not 5. ~ The answer is definitely not 5. ~ It isn't 5. ~ It is anything but 5. ~ It is clearly less than 5"
         " ~ It is no more than 5 ~ The answer is x > 5 ~ The answer is x >= 5 ~ I tried. The answer is x > 5 ~ The answer is negative 5"
         " ~ The value is minus 5. ~ We tried it. The value is minus 5."),
        ("2", "so it equals 2", "so it equals - 2 ~ the result is -(2) ~ the result is n - 2"),
    ],
    "parts of a formula in prose": [
        ("2", "The answer is (2). ~ The answer is 2 (two).",
         "The answer is sqrt(2) ~ I tried. The answer is sqrt(2). ~ The answer is 2√3 ~ I tried. The answer is 2√3."
         " ~ The answer is f(2) ~ The answer is 2 ± 1 ~ The answer is log_10(2) ~ So the point is (1, 2)."
         " ~ I tried it. So the point is (1, 2)."),
        ("3", "The answer is 3.0 m/s", "The answer is 3.0 × 10^8 m/s ~ We know it. The answer is 3.0 × 10^8 m/s."),
        ("300000000", "We know it. The answer is 3.0 × 10^8 m/s.", "We know it. The answer is 3.0 × 10^7 m/s."),
        ("5", "The answer is 5 of the apples. ~ The answer is 5 times. ~ The answer is 5!!",
         "The answer is 5 plus 6 ~ The answer is 5 squared ~ The answer is 5 factorial ~ The answer is 5 dozen"
         " ~ The answer is 5 × 6 ~ The answer is 5% of 6 ~ We tried it. The answer is 5 plus 6."),
    ],
    "parts of plain formulas": [
        ("3", "The answer is **3** apples. ~ We get 3 over the years.",
         "The answer is 3 x 10^8 m/s. ~ The answer is 3 x^2. ~ The answer is 3 choose 2. ~ The answer is 3 halves."
         " ~ The answer is 3 over 10. ~ The answer is 3 out of 10. ~ The answer is 3 to the power 4. ~ So it is 5 x 3."),
        ("300000000", "The answer is 3 x 10^8 m/s.", "The answer is 3 x 10^7 m/s."),
        ("5", "Dividing 10 by 2 gives 5. ~ If $a=3$ and $b=4$, then $c=5$. ~ So $x=4$ and $y=5$.",
         "The answer is 5 sqrt(2). ~ The answer is 5 sin(x). ~ The answer is 5 ln 2. ~ The answer is 5 mod 3."),
        (r"5\sqrt{2}", r"The answer is 5 sqrt(2). ~ \boxed{5 sqrt(2)} ~ So it is 5*sqrt(2)", r"\boxed{5 sqrt(3)}"),
        (r"3\sin(x)", r"\boxed{3 sin(x)} ~ \boxed{3sin(x)}", r"\boxed{3 cos(x)}"),
        ("8", "5 + 3 = 8 ~ Adding 5 + 3 gives 8 ~ So 2 x 4 = 8 apples. ~ The value of a + b is 8.",
         "The value of the expression is a + 8. ~ The value is log 8. ~ The value is sqrt 8. ~ It is 2**8."),
        ("7", "We round 6.7 to 7. ~ It went from 5 to 7.", "The polynomial is x^2 + 7. ~ The line is y = x + 7."),
        ("10", "It is 10.", "So the probability is 3 out of 10. ~ The ratio is 3 to 10. ~ The chance is 1 in 10."),
    ],
    "several values in prose": [
        ("4", "So x = 2 and y = 4.",
         "The solutions are x = 2 and x = 4. ~ So x = 2 or x = 4. ~ Hence the roots are $2$ and $4$. ~ [2, 4] is the interval"
         " ~ <answer>The solutions are $x=2$ and $x=4$</answer> ~ <answer>The solution set is {2, 4}</answer>"
         " ~ The interval is [2, 4]. ~ The answer is x=4 and x=2. ~ <answer>x does not equal 4</answer>"),
        ("2,3", "Factor it.\n\nHence $x=2$ or $x=3$. ~ Factor it.\n\nTherefore the solutions are 2 and 3.",
         "Factor it.\n\nHence $x=2$ or $x=4$. ~ Factor it.\n\nTherefore the solutions are 2 and 4."),
        ("2 hours 30 minutes", "It takes 2 hours and 30 minutes. ~ We count. It takes 2 hours 30 minutes.",
         "We count. It takes 3 hours and 30 minutes. ~ It takes 30 minutes."),
        ("30", "In 2 hours, 30 trains pass.",
         "<answer>2 hours 30 minutes</answer> ~ It takes 2 hours 30 minutes. ~ The price is 3 dollars and 30 cents."),
    ],
    "values of one name, and lists": [
        ("5", "The solutions are x = 5 and x = -3. Since x must be positive, x = 5.", "So x is arctan 5. ~ So it is log₂ 5. ~ It is half of 5."),
        ("4", "t = -2 or t = 4. Since time cannot be negative, $t = 4$ seconds. ~ Since x = -4 is impossible, x = 4."
         " ~ n = 3 is too small and n = 4 is the smallest that works.", "It cannot be 4. ~ It is 11 in base 4. ~ x is 2 times 4"),
        ("3", "He has 3 tan dogs left. ~ So he has 3 quarters. ~ The answer is 3 quarters.",
         "The solutions are 1, 2, and 3. ~ The solutions are $1$, $2$, and $3$. ~ The solutions are 2, 3. ~ So x = 2, 3."),
        ("1,2,3", "We solve. The solutions are 1, 2, and 3.", "We solve. The solutions are 1, 2, and 4."),
        ("12,8", "8 feet and 12 feet ~ The dimensions are 12 feet and 8 feet.", "The dimensions are 12 feet and 9 feet."),
    ],
    "sentences in place of a part": [
        ("(2,-3)", "We complete the square. Therefore, the vertex is (2, -3).", "Therefore, the vertex is (-2, 3)."),
        ("-2<x<3", "We solve. Therefore, -2 < x < 3.", "We solve. Therefore, -3 < x < 2."),
        ("2,3", "Therefore, $x = 2$ or $x = 3$. ~ Therefore, the solutions are 2 and 3.", "Therefore, $x = 2$ or $x = 4$."),
        (r"5\sqrt{2}", "By the Pythagorean theorem, the hypotenuse is 5√2.", "By the theorem, the hypotenuse is 5√3."),
        (r"\ln 5", "We integrate. So x = ln 5.", "We integrate. So x = ln 6. ~ We integrate. So x = 5."),
        ("9", "The remainder is 9 (mod 10).", "The remainder is 8 (mod 9). ~ It is 12 mod 9."),
        ("3-i", "We solve it. The answer is 3 - i.", "We solve it. The answer is 3 + i."),
        ("2", "2", "The answer is 2(x + 1). ~ The answer is 2x - y. ~ The answer is 2 - i. ~ The area is 2 π."),
    ],
    "quantities of two units": [
        ("2 hours, 30 minutes", "2 hours and 30 minutes", "2 hours and 20 minutes"),
        ("2 hours 30 minutes", "We count. The answer is 2 hours 30 minutes.", "We count. The answer is 3 hours 30 minutes."),
        ("2", "2", "The answer is 2 hours and 30 minutes."),
        ("15", "Over the 3 days, 15 inches of snow fell.", "It snowed 14 inches."),
        ("90", "It takes 1.5 hours, 90 minutes.", "80"),
        ("25", "After paying 3 dollars, 25 cents are left.", "It costs 3 dollars and 25 cents."),
        ("300", "The answer is $300 over 5 days.", "30"),
        ("3:30 PM", "We count. The train leaves at 3:30 PM.", "We count. The train leaves at 3:30 AM. ~ We count. The answer is 3:30 AM."),
    ],
    "names before the equals sign": [
        (r"\frac{x-3}{2}", r"\boxed{f^{-1}(x) = \frac{x-3}{2}}", r"\boxed{f^{-1}(x) = \frac{x+3}{2}}"),
        (r"\frac13", r"\boxed{P(A|B) = \frac{1}{3}} ~ \boxed{P(A \cap B) = 1/3} ~ \boxed{E[X] = 1/3}", r"\boxed{P(A|B) = \frac{1}{2}}"),
        ("8", "Ans: 8", "Ans: 9"),
    ],
    "emphasis": [
        ("18", "所以答案是**18**元。 ~ 小明一共有**18**个苹果。 ~ 一共有18个苹果。 ~ So it is **18**cm.", "所以答案是**19**元。"),
        ("1024", "We multiply. The answer is 2^{10}.", "We multiply. The answer is 2^{9}."),
        ("78.5", "We square 5. So the area is ≈78.5 cm².", "We square 5. So the area is ≈79.5 cm²."),
    ],
    "scales and dates": [
        ("10 lakh", r"1000000 ~ \boxed{10 \text{ lakh}}", "10"),
        ("5 crore", "<answer>5 crore rupees</answer> ~ 50000000", "<answer>5 lakh rupees</answer> ~ 5"),
        ("6", "6", r"\boxed{6\text{ doubled}} ~ \boxed{\text{quadruple }6}"),
        ("40", r"\boxed{4十}", r"\boxed{4}"),
        ("June 5 to July 6", "5 June to 6 July ~ June 5 - July 6", r"\boxed{\text{June 6 to July 5}} ~ July 6 to June 5"),
        ("June 5 and July 6", "July 6 and June 5", "June 6 and July 5"),
    ],
    "words behind answer is": [
        ("3", "The answer is 3. It is no surprise.", "We test it for n = 3. The answer is no. ~ I checked 3 cases.\n\nAnswer: none"),
        ("yes", "Therefore, the answer is yes. ~ We test it for n = 3. The answer is yes. ~ We tried.\n\n**Answer**: Yes",
         "We test it for n = 3. The answer is no."),
        ("Paris", "We look at 3 cities. The answer is Paris. ~ We look at 3 cities. The answer is **Paris**.", "We look at 3 cities. The answer is Rome."),
    ],
    "text around a formula": [
        ("all integers n such that n > 2", r"\boxed{\text{all integers } n \text{ such that } n>2}",
         r"\boxed{all integers n such that n < 2} ~ \boxed{all integers n such that n \ge 2}"),
    ],
    "opposites": [
        ("20% increase", r"\boxed{20\%} ~ an increase of 20%", "20% decrease ~ a decrease of 20%"),
        ("profit of $5", "$5 profit ~ 5", "loss of $5 ~ $5 loss"),
        ("5 km east", "5 km east ~ 5", "5 km west"),
        ("maximum of 5", "maximum 5", "minimum of 5"),
        ("converges to 1", "it converges to 1", "diverges to 1"),
    ],
    "labels": [
        ("5 apples, 3 oranges", "5 apples and 3 oranges ~ 3 oranges, 5 apples ~ 5, 3", "3 apples, 5 oranges"),
        ("length 5, width 3", "length 5 and width 3 ~ width 3, length 5", "length 3, width 5"),
        ("x=1, y=2", r"\boxed{y=2, x=1} ~ 1, 2", r"\boxed{y=1, x=2} ~ 2, 1"),
    ],
    "what is right all the same": [
        ("5", "We get x = 5. Checking, 2 + 3 = 5. So the answer is correct. ~ We get 5. So the answer is reasonable."
         " ~ The answer is as follows:\n\n5 ~ The answer is shown below:\n\n$x = 5$ ~ The answer is clear. It is 5."
         " ~ The final answer is given by: \n\n5 ~ The answer is obtained by adding.\n2 + 3 = 5"
         " ~ The answer must be positive. So x = 5. ~ We compute x = 5. Note that the answer must be positive."
         " ~ The answer will be rounded.\nSo it is 5. ~ The answer should be an integer. We get 5."
         " ~ We get x = 5. So the answer is the one that we looked for."
         " ~ Here is the total.\n  - 5 apples ~ **Answer:**\n\n- 5 apples ~ The answer is:\n- 5 ~ Final count - $5$."
         " ~ The right answer is 5 apples. ~ You were right, so 5 apples. ~ \\boxed{5 \\text{ other apples}}",
         "We get x = 6. So the answer is correct. ~ The answer is as follows:\n\n6"),
        ("5 apples left", "The right answer is 5 apples. ~ All right, it is 5. ~ 5 apples", "6 apples left"),
        ("A", "The answer is A according to the text. ~ The answer is A given that x > 0 ~ The answer is A in this case"
         " ~ The answer is A and not B ~ The answer is A, not B.", "The answer is B according to the text."),
        ("(B) 20 J", r"\boxed{B} ~ 20 J ~ \boxed{\text{(B) 20 J}}", r"\boxed{C} ~ 30 J"),
        ("B", r"\boxed{B. Vitamin C} ~ (B) Plan A. ~ B) 20 C", r"\boxed{C. Vitamin B}"),
        ("2", "<think> 1+1=2 <answer>2</answer> ~ <answer>2</answer>\n<think>check 3</think>"
         " ~ <think>a</think><answer>2</answer></think> ~ \\boxed{2}\n\n</think>\n ~ So it is \\boxed{2}</think>",
         "<think> 1+1=2 <answer>3</answer> ~ <think>so \\boxed{2}"),
        ("1.5", "So it takes 90 minutes or 1.5 hours.", "So it takes 90 minutes or 2.5 hours."),
        ("150", "It costs $1.50, or 150 cents.", "It costs $1.40, or 140 cents."),
        ("x<1 or x>3", "Solve it and get x<1 , x>3", "x<1 and x>3"),
    ],
    "Unicode": [
        ("2n", r"\boxed{2n}", r"\boxed{2ⁿ}"),
        ("2^n", r"\boxed{2ⁿ}", r"\boxed{2n}"),
        ("2^{n+1}", r"\boxed{2ⁿ⁺¹}", r"\boxed{2n+1}"),
        ("1011_2", r"\boxed{1011₂}", "10112"),
        ("10112", "10112", r"\boxed{1011₂}"),
        ("H2O", "H₂O", "CO₂"),
        ("x_1=2", "x₁=2", "x₂=2"),
        ("2", "√4", "√12"),
        (r"2\sqrt3", r"√12 ~ √(12) ~ 2√3", "√13 ~ √1·2"),
        ("f'(x)=2x", "f′(x)=2x", "f(x)=2x"),
        (r"\Delta", r"\boxed{\Delta}", r"\boxed{\delta}"),
        (r"\Phi+1", r"\boxed{1+\Phi}", r"\boxed{1+\phi}"),
        (r"\infty", r"\boxed{+\infty} ~ ∞", r"\boxed{2\infty} ~ -\infty"),
    ],
    "functions of a name": [
        ("1", "x=1", r"\boxed{\sin x=1}"),
        ("x=5", "5", r"\boxed{\log_2 x=5}"),
        ("a_{n+1}=2a_n", r"\boxed{a_{n+1}=2a_n}", r"\boxed{a_n=2a_n}"),
        ("a_{n+1}=3", "3", "x=3 ~ a_n=3"),
    ],
    "sizes and directions": [
        (r"(-\infty,3)", "x<3", r"\boxed{|x|<3}"),
        ("(-3,3)", r"\boxed{|x|<3} ~ 3>|x|", r"\boxed{|x|\le 3} ~ |x|<4"),
        (r"[3,\infty)", r"\boxed{x\ge 3}", r"\boxed{|x|\ge 3}"),
        (r"|x|<3", r"\boxed{|x|<3} ~ -3<x<3", r"\boxed{x<3}"),
        (r"x>1 \text{ and } x<4", r"x>1\text{ and }x<4 ~ x<4 and x>1", r"x>1\text{ or }x<4"),
    ],
    "signs of lists and repeating decimals": [
        (r"\pm 1, \pm 2", r"1,-1,2,-2 ~ \pm2,\pm1", r"\boxed{(1,2),(-1,-2)} ~ 1,2"),
        (r"0, \pm 1", "-1,0,1", "0,1"),
        (r"\frac13", r"0.(3) ~ 0.\dot{3} ~ 0.\overline3", "0.(4)"),
        (r"\frac{1}{7}", r"0.\dot{1}4285\dot{7} ~ 0.(142857)", "0.(14)"),
        ("12.6", "12.6", "2.1(6)"),
    ],
    "parts that are whole": [
        ("96", "We get 48 × 2 = 96 ~ We get 98 - 2 = 96. ~ so we get -> 96 ~ We get it.\nSo 48 × 2 = 96.", "We get 48 × 2 = 95"),
        ("5", "The answer is 5, not 6. ~ The answer is 5 not 6 ~ The answer is 5. It is odd or prime."
         " ~ One of the 7 boys left, so 5 ~ The answer is what we count next. There are 3 and 2, in total 5."
         " ~ He needs at least 5 ~ The answer is **5**, so 10/2 = 5.", "The answer is **6**"),
        ("30", "The answer is 5 × 6 = 30.", "The answer is 5 × 6 = 31."),
    ],
    "formats of choices": [
        ("B", "We check all.\n\n**Answer: B** ~ We check all. **The answer is B** ~ We check all.\n\n**Final Answer**: B"
         " ~ The answer is option B. ~ We check all. The answer is option B. ~ We check all. So the answer would be B.",
         "We check all.\n\n**Answer: C** ~ The answer is option C."),
    ],
    "boxes and plain text": [
        (r"So we get $\boxed 2$.", "2", "3"),
        (r"So we get $\boxed2$.", r"2 ~ \boxed 2", "3"),

        (r"\frac{\pi}{2}", "pi/2", "pi"),
        (r"2\pi", r"2*pi ~ 2pi", "2 ~ 3*pi"),
        (r"\ln 2", "ln(2)", "ln(3) ~ 2"),
        ("e^{-2}", "exp(-2) ~ e^-2", "exp(2) ~ e-2"),
        (r"\frac1x", "x^-1 ~ x^{-1}", "x-1"),
        ("|x|", "abs(x)", "x"),
        (r"\infty", "infinity", "0"),
        (r"\Gamma", r"\boxed{\Gamma}", r"\gamma"),
        (r"\Sigma", r"\boxed{\Sigma}", r"\sigma"),
        (r"\Pi", r"\boxed{\Pi}", r"\pi ~ 3.14159"),
        (r"\Gamma(5)", "24", "120"),
        ("72", r"So \fbox{72}, as 1 is left over.", r"So \fbox{71}"),
        ("(101)_2", "101_2", "101 ~ 101_3"),
        ("72", "\\boxed{72}\n\n#### Check\n48 + 24 is right.", "\\boxed{71}\n\n#### Check\n48 + 24 is 72.\nDone."),
        ("18", r"\boxed{\color{red}{18}} ~ \boxed{\underline{18}} ~ \boxed{\bf 18} ~ 18</s> ~ \boxed{\textcolor{red}{18}}", r"\boxed{\color{red}{81}}"),
    ],
    "letters of a formula": [
        (r"\pi r^{2} h", r"\boxed{\pi r^2h} ~ \boxed{\pi r^2 h}", r"\boxed{\pi r^2}"),
        (r"mg\sin\theta", r"\boxed{m g \sin \theta} ~ \boxed{mg \sin(\theta)}", r"\boxed{\sin\theta} ~ \boxed{mg\cos\theta}"),
        (r"\frac{1}{2}at^2", r"\boxed{\frac{1}{2} a t^2}", r"\boxed{1/2} ~ \boxed{\frac{1}{2}at}"),
        (r"\frac{1}{2} m v^{2}", r"\boxed{\frac{1}{2}mv^2}", r"\boxed{\frac12}"),
        ("2m+1", r"\boxed{2 m + 1} ~ \boxed{1+2m}", r"\boxed{2m}"),
        ("(a+b) h", r"\boxed{(a+b)h}", r"\boxed{a+b}"),
        ("5 m", r"\boxed{5\text{ m}} ~ 5", "6 m"),
    ],
    "parts cut from a formula": [
        (r"5\sqrt{3}", r"We solve it. The answer is 5\sqrt{3}.", r"We solve it. The answer is 5\sqrt{3}/2."),
        (r"4\pi", r"We solve it. The answer is 4\pi.", r"We solve it. The answer is 4\pi/3."),
        ("2", "We solve it. The answer is 2.", "We solve it. The answer is 2 < x < 5."),
        ("2n", "We solve it. The answer is 2n.", "We solve it. The answer is 2n(2n+1)."),
    ],
    "displayed formulas": [
        ("42", "The answer is:\n$$\n42\n$$ ~ Therefore, the answer is\n\\[\n42\n\\]", "The answer is:\n$$\n43\n$$"),
        (r"\frac12", "Therefore, the final answer is:\n\n\\[\n\\frac{1}{2}\n\\]", "The answer is:\n\\[\n\\frac{1}{3}\n\\]"),
    ],
    "two numbers": [
        ("3", "so we get 3 ~ we take 3 ≈ 3.001", "so we get 3 ≈ 7 ~ we take 3 ⊕ 7 ~ x = 3 ≈ 7 in all"),
        (r"\sqrt{2}", r"The length is $\sqrt{2} \approx 1.41$.", r"The length is $\sqrt{3} \approx 1.73$."),
        ("21", "we take 21", "we take 3 ∘ 7"),
        ("2.5", "It takes 2 ½ hours. ~ We see. It takes 2½ hours.", "It takes 2 ¼ hours."),
        ("6", "6 oranges", "<answer>5 apples and 6 oranges</answer>"),
        ("5", "#### 5\n\n6 minutes.", "#### 6\n\n5 minutes."),
    ],
    "more opposites": [
        (r"90^\circ clockwise", r"\boxed{90^\circ \text{ clockwise}}", r"\boxed{90^\circ \text{ counterclockwise}}"),
        ("5 minutes late", "5 minutes late", "5 minutes early"),
        ("3 years older", "3 years older", "3 years younger"),
        ("20% gain", "20% gain", "20% loss"),
        ("向东5米", "向东5米", "向西5米"),
        ("增加5%", "增加5%", "减少5%"),
    ],
    "Chinese words that change a number": [
        ("5", r"\boxed{5} ~ 一共5个", r"\boxed{大于5} ~ \boxed{不是5} ~ \boxed{至少5} ~ \boxed{5的平方} ~ \boxed{5的倍数} ~ \boxed{根号5}"),
    ],
    "the imaginary unit": [
        ("2i", r"\boxed{(1+i)^2}", r"\boxed{(1-i)^2} ~ \boxed{2}"),
        ("-1", r"\boxed{i^2}", r"\boxed{i}"),
        (r"\frac{1-i}{2}", r"\boxed{\frac{1}{1+i}}", r"\boxed{\frac{1+i}{2}}"),
    ],
    "spaces and fonts": [
        ("45", r"\boxed{45\text{ sec}} ~ \boxed{x \text{ is } 45}", r"\boxed{54\text{ sec}}"),
        ("B", r"\boxed{(\text{B})} ~ \boxed{\boldsymbol{B}} ~ \boxed{\left(\text{B}\right)}", r"\boxed{(\text{C})}"),
        (r"\sin x", r"sin x ~ \boxed{\operatorname{sin} x} ~ \boxed{\mathrm{sin}\,x}", "cos x"),
        (r"\arctan 2", "arctan(2)", "arctan(3)"),
        (r"\varphi", r"\boxed{\phi}", r"\boxed{\psi}"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix}1\\[4pt]2\end{pmatrix}}", r"\boxed{\begin{pmatrix}2\\[4pt]1\end{pmatrix}}"),
    ],
    "sets and roots": [
        (r"\{x\mid x>1\}", r"\boxed{(1,\infty)} ~ \boxed{x>1} ~ \boxed{\{x | x > 1\}}", r"\boxed{x<1} ~ \boxed{(0,\infty)}"),
        (r"\{\pm 1, \pm 2\}", r"\boxed{\{-2,-1,1,2\}}", r"\boxed{\{-2,1,2\}}"),
        ("-2,3", r"\boxed{x_1=3, x_2=-2} ~ \boxed{x_1=-2, x_2=3}", r"\boxed{x_1=3, x_2=2}"),
    ],
    "marks around a value": [
        ("42", "The result is **42**! ~ = 42 ~ <answer>42,</answer>", "The result is **43**!"),
        ("5", r"∴ x = 5 ~ => 5 ~ \boxed{\therefore x=5} ~ \boxed{5 \checkmark} ~ ✅ **5**", "∴ x = 6"),
        ("18", "<answer>#### 18</answer>", "<answer>#### 19</answer>"),
    ],
    "units of one letter": [
        ("12 m", r"12m ~ \boxed{12m}", r"13m ~ 12x ~ \boxed{12s}"),
        ("12m", r"12 m ~ 12 meters", r"13 m ~ 12 seconds ~ 12 ~ 12 mm ~ 12 mph"),
        ("3t", "3 t", "The value is 3 ~ total of 3 ~ Therefore 3"),
        ("60 m/s", "60m/s", "60m/h ~ 60m/x"),
        ("5 m", "5m", "5M"),
        ("5 m", "5m", r"5/0m ~ \frac{5}{0}m"),
        ("12", "12 m", "12m"),
        ("4 hours", "4h ~ 4 h", "4m ~ 5h"),
        ("9.8 m/s^2", "9.8m/s^2 ~ 9.8 m/s^2", "9.7m/s^2"),
        (r"\frac{1}{2} m", r"\boxed{\frac{1}{2}m}", r"\boxed{\frac{1}{3}m}"),
    ],
    "times of day": [
        ("9:00 AM", "9 a.m. ~ 9 AM ~ 9:00", "9 PM ~ 9 ~ 9:30 AM ~ 10 a.m."),
        ("5 p.m.", "5:00 PM ~ 17:00 ~ 5:00", "5 a.m. ~ 5:30 PM ~ 18:00 ~ 17 apples"),
        ("t = 3 PM", "3 PM ~ t = 3 PM", "3 AM"),
        ("B. 2:30 PM", "2:30 PM ~ B", "2:30 AM"),
        ("14:30", "2:30 PM", "2:30 AM ~ 2:30 ~ 3:30 PM"),
        ("12:00 AM", "12 AM ~ 0:00", "12 PM"),
        ("12:00", "12 PM", "12 AM"),
    ],
    "written in another way": [
        ("H_2O", r"H2O ~ H₂O ~ \boxed{\text{H}_2\text{O}}", "H_2O_2 ~ HO_2"),
        ("AB_2", "AB_2", "AB2"),
        ("P_1S_2", "P_1S_2", "P1S2"),
        ("$1.5 in May", "$1.5 in May", "$1.05 in May"),
        (r"x \equiv 3 \pmod 5", r"x ≡ 3 (mod 5) ~ x \equiv 3 \bmod 5", r"x ≡ 2 (mod 5) ~ x \equiv 3 \pmod 7"),
        ("3:2", "3 to 2", "2 to 3 ~ 3 to 1 ~ 3-2"),
        ("7-4", "3", "7:4 ~ 7 to 4"),
        ("5-10", "5 to 10", "5 to 11"),
        ("March 5, 2024", "2024-03-05 ~ March 05, 2024", "2024-05-03 ~ 2024-03-06"),
        ("no solution", r"No solutions. ~ \boxed{\emptyset} ~ ∅", "one solution"),
        ("DNE", "does not exist", "exists"),
        (r"(-\infty, \infty)", "all real numbers", "all numbers but 0"),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", "[[1, 2], [3, 4]]", "[[1, 3], [2, 4]] ~ [1, 2, 3, 4]"),
    ],
    "verdicts and choices with a reason": [
        ("Yes", "Yes, because the sum is even. ~ **Yes**, as 4 is even.", "No, as 3 is odd. ~ Yes. No. ~ Yes, but that is wrong."),
        ("No", "No, since 3 is odd.", "No number is even. ~ Yes, there is no odd one. ~ No. of solutions: 3 ~ No. 5 ~ No, wait. It is prime!"),
        ("True", "True, since the set is closed.", "True or false? ~ True. This is incorrect."),
        ("B", "So B is correct. ~ Option B is the correct answer! ~ **B** is the best choice. ~ (B) is right.",
         "It is not true that B is correct. ~ I think that B is correct. ~ B is correct? No, C is correct. ~ "
         "Neither option A nor option B is correct. ~ A is correct. B is correct. ~ I doubt that option B is correct. ~ "
         "It is false that\nB is correct. ~ We choose (A). B is correct."),
        ("5", "x = 5. So A is correct.", "x = 6. So A is correct."),
        ("5% increase", "The change is **5%**.", "The decrease is **5%**."),
        ("A", "x = 5. So A is correct. ~ A. The capital is **New York**.", "x = 5. So B is correct."),
        ("Paris", "The capital of France is **Paris**.", "The capital of **France** is **Paris**. ~ It is **Rome**. ~ "
         "It is not **Paris**. ~ None of the capitals is **Paris**. ~ The incorrect capital is **Paris**. ~ It could be Lyon or **Paris**."),
    ],
}  # fmt: skip
