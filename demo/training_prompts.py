"""Write the coding prompts that the demo drafter is trained on, as JSON lines.

    python demo/training_prompts.py > prompts.jsonl

Every topic below is combined with several wordings, and the result is shuffled with a fixed seed, so
the output is the same on every run and any prefix of it is a fair sample. The topics of the
evaluation prompts are left out on purpose: FizzBuzz, binary search, reversing a linked list,
palindromes, word counts, merging sorted lists, bank accounts, averaging a CSV column, transposing a
matrix and LRU caches. ``FORBIDDEN`` guards against adding one of them by accident.
"""

import json
import random
import re

SEED = 20250
FUNCTION_WORDINGS_PER_TOPIC = 5

# Function topics, by category: "name: what the function does", to be read after "a function that".
FUNCTIONS = {
    "strings": """
        count_vowels: counts the vowels in a string
        reverse_string: reverses a string without using slicing
        capitalize_words: capitalizes the first letter of every word in a sentence
        remove_punctuation: removes all punctuation from a string
        is_anagram: checks whether two strings are anagrams of each other
        caesar_cipher: encrypts a message with a Caesar cipher and a given shift
        run_length_encode: compresses a string with run-length encoding
        run_length_decode: expands a run-length encoded string
        snake_to_camel: converts a snake_case name to camelCase
        camel_to_snake: converts a camelCase name to snake_case
        longest_common_prefix: finds the longest common prefix of a list of strings
        first_unique_char: returns the first character that appears only once in a string
        is_pangram: tests whether a sentence contains every letter of the alphabet
        swap_case: swaps upper and lower case letters in a string
        truncate_text: shortens a string to a maximum length and adds an ellipsis
        pad_left: pads a string on the left with zeros up to a given width
        rot13: applies the ROT13 substitution to a text
        vigenere_encrypt: encrypts a text with the Vigenere cipher
        to_morse: translates a text into Morse code
        from_morse: decodes a Morse code message
        pig_latin: translates an English sentence into Pig Latin
        count_substring: counts overlapping occurrences of a substring
        remove_duplicate_chars: removes repeated characters while keeping the original order
        is_rotation: checks whether one string is a rotation of another
        slugify: turns a blog title into a URL slug
        mask_card_number: masks all but the last four digits of a card number
        initials: returns the initials of a full name
        hamming_distance: computes the Hamming distance of two equal-length strings
        edit_distance: computes the Levenshtein distance between two strings
        longest_word: finds the longest word in a sentence
        strip_html_tags: removes HTML tags from a string
        center_text: centers a line of text inside a box of asterisks
        expand_tabs: replaces every tab in a string with four spaces
        int_to_words: spells out an integer between 0 and 999 in English
        compare_ignore_case: compares two strings while ignoring case and surrounding spaces
        longest_unique_substring: finds the length of the longest substring without repeated characters
        split_chunks: splits a string into pieces of a fixed size
        interleave_strings: interleaves the characters of two strings
        is_valid_identifier: tells whether a string is a valid Python variable name
        repeat_chars: doubles every character of a string
    """,
    "numbers": """
        is_prime: checks whether a number is prime
        sieve: lists all primes below n with the sieve of Eratosthenes
        gcd: computes the greatest common divisor with Euclid's algorithm
        lcm: computes the least common multiple of two integers
        prime_factors: returns the prime factors of an integer
        digit_sum: adds up the digits of a non-negative integer
        is_perfect: checks whether a number is perfect
        is_armstrong: checks whether a number is an Armstrong number
        collatz: returns the Collatz sequence starting from n
        to_binary: converts a decimal integer to a binary string without using bin
        from_binary: converts a string of zeros and ones to an integer
        to_roman: converts an integer to a Roman numeral
        from_roman: converts a Roman numeral to an integer
        celsius_to_fahrenheit: converts a temperature from Celsius to Fahrenheit
        is_leap_year: decides whether a year is a leap year
        fast_power: raises a number to an integer power by repeated squaring
        integer_sqrt: computes the integer square root with Newton's method
        is_even: returns True if a number is even and False otherwise
        clamp: limits a number to a given range
        round_to_nearest: rounds a number to the nearest multiple of a step
        divisors: lists all divisors of a positive integer
        triangular: returns the first n triangular numbers
        compound_interest: computes the value of an investment with yearly compound interest
        bmi: calculates the body mass index and returns its category
        quadratic_roots: solves a quadratic equation and handles complex roots
        distance: computes the Euclidean distance between two points in the plane
        circle_area: computes the area and circumference of a circle
        triangle_area: computes the area of a triangle from its three sides
        base_convert: converts a number from base 10 to any base up to 36
        digital_root: computes the digital root of a number
        count_set_bits: counts the one bits in the binary form of an integer
        is_power_of_two: checks whether an integer is a power of two
        reverse_integer: reverses the digits of an integer and keeps its sign
        pi_estimate: approximates pi with the Leibniz series
        percent_change: computes the percentage change between two values
        tip_calculator: splits a restaurant bill with a tip between several people
        seconds_to_hms: converts a number of seconds to hours, minutes and seconds
        format_bytes: formats a number of bytes as a human readable size
        coprime: checks whether two integers are coprime
        nth_root: computes the n-th root of a positive number with Newton's method
    """,
    "lists": """
        remove_duplicates: removes duplicates from a list while preserving the order
        second_largest: returns the second largest distinct number in a list
        flatten: flattens a nested list of arbitrary depth
        chunk: splits a list into chunks of size n
        rotate_list: rotates a list to the right by k positions
        find_missing: finds the missing number in a list containing 1 to n
        two_sum: finds the indices of two numbers that add up to a target
        max_subarray: finds the contiguous subarray with the largest sum
        move_zeros: moves all zeros to the end of a list
        common_elements: returns the elements that occur in both of two lists
        running_total: returns the list of running totals of a list of numbers
        partition_even_odd: splits a list of integers into even and odd numbers
        list_difference: returns the items of one list that are not in another
        zip_longest_lists: pairs the items of two lists and fills missing items with None
        median: computes the median of a list of numbers
        mode: finds the most common value in a list
        std_dev: computes the standard deviation of a list of numbers
        moving_average: computes the moving average of a list with a given window
        min_max: returns the minimum and maximum of a list in a single pass
        is_sorted: checks whether a list is sorted in ascending order
        find_peaks: finds all local maxima in a list of numbers
        pairwise_differences: returns the differences between consecutive numbers
        dot_product: computes the dot product of two vectors
        normalize: scales a list of numbers to the range 0 to 1
        product_except_self: returns for each position the product of all the other numbers
        majority_element: finds the element that occurs in more than half of the positions
        leaders: finds the elements that are greater than everything to their right
        count_inversions: counts the inversions in a list
        three_sum: finds all unique triples in a list that sum to zero
        longest_increasing_run: finds the longest run of increasing values
        swap_ends: swaps the first and the last item of a list
        remove_at: removes the item at a given index without using pop or del
        insert_every: inserts a separator value between all neighboring items of a list
        filter_range: keeps only the numbers between a lower and an upper limit
        index_of_all: returns all positions at which a value occurs in a list
        cumulative_max: returns the running maximum of a list
        shuffle_list: shuffles a list with the Fisher-Yates algorithm
        sample_without_replacement: picks k random items from a list without repeating any
        weighted_choice: picks a random item according to given weights
        batch_sum: sums every group of three consecutive numbers in a list
    """,
    "dicts": """
        invert_dict: swaps the keys and values of a dictionary
        merge_dicts: combines two dictionaries and adds the values of shared keys
        group_by_length: groups a list of words by their length
        sort_by_value: sorts a dictionary by its values in descending order
        flatten_dict: flattens a nested dictionary using dotted keys
        unflatten_dict: rebuilds a nested dictionary from dotted keys
        dict_diff: lists the keys that were added, removed or changed between two dictionaries
        filter_dict: keeps only the entries whose value satisfies a condition
        deep_get: reads a value from a nested dictionary with a default for missing keys
        key_of_max: returns the key with the largest value
        count_types: counts how many values of each type a list contains
        group_students: groups a list of student records by their grade
        index_by_id: builds a dictionary from id to record for a list of records
        invert_multi: maps every value of a dictionary to the list of keys that have it
        rename_keys: renames keys of a dictionary according to a mapping
        deep_merge: merges two nested dictionaries recursively
        dict_to_query: converts a dictionary into a URL query string
        lookup_table: builds a dictionary of squares for the numbers 1 to n
        remove_none: removes all keys with the value None from a nested dictionary
        total_by_category: adds up expenses by category from a list of tuples
        shopping_total: computes the total price of a shopping cart given a price dictionary
        update_inventory: updates stock levels in an inventory dictionary after a sale
        top_scores: returns the three players with the highest scores
        phone_lookup: looks up a phone number by name in a dictionary and handles unknown names
        most_expensive: finds the most expensive product in a list of dictionaries
    """,
    "recursion": """
        factorial: computes the factorial of n recursively
        fibonacci: returns the n-th Fibonacci number using memoization
        hanoi: solves the Towers of Hanoi and prints every move
        permutations: generates all permutations of a list recursively
        subsets: generates all subsets of a set
        combinations: generates all combinations of k items recursively
        ackermann: computes the Ackermann function for small arguments
        sum_nested: adds up all the numbers in a nested list
        power: computes x to the power n recursively
        count_down: prints a countdown from n to 1 recursively
        flood_fill: fills a connected region of a grid with a new color
        generate_parentheses: generates all balanced combinations of n pairs of parentheses
        n_queens: solves the N queens problem with backtracking
        sudoku_solve: solves a Sudoku puzzle with backtracking
        maze_path: finds a path through a maze with recursive backtracking
        coin_change: counts the ways to make change for an amount
        knapsack: solves the 0/1 knapsack problem
        climb_stairs: counts the ways to climb n stairs taking one or two steps
        pascal_triangle: builds the first n rows of Pascal's triangle
        gray_code: generates the n-bit Gray code
        depth_of_list: computes the maximum nesting depth of a list
        subset_sum: decides whether some subset of the numbers adds up to a target
        longest_common_subsequence: finds the longest common subsequence of two strings
        catalan: computes the n-th Catalan number
        letter_combinations: lists all letter combinations for a phone keypad number
    """,
    "sorting": """
        bubble_sort: sorts a list with bubble sort
        insertion_sort: sorts a list with insertion sort
        selection_sort: sorts a list with selection sort
        quick_sort: sorts a list with quicksort
        heap_sort: sorts a list with heapsort
        counting_sort: sorts small non-negative integers with counting sort
        radix_sort: sorts integers with radix sort
        shell_sort: sorts a list with Shell sort
        bucket_sort: sorts floating point numbers with bucket sort
        sort_by_last_name: sorts a list of full names by last name
        sort_tuples: sorts a list of tuples by the second element
        sort_by_length: sorts strings by length and then alphabetically
        natural_sort: sorts file names so that file2 comes before file10
        dutch_flag: sorts a list containing only the values 0, 1 and 2
        kth_smallest: finds the k-th smallest element of a list with quickselect
        top_k: returns the k largest elements using a heap
        sort_dicts: sorts a list of dictionaries by a given key
        sort_by_parity: places even numbers before odd numbers
        stable_sort_demo: sorts records by age and keeps the order of records with equal age
        sort_dates: sorts a list of date strings chronologically
    """,
    "files": """
        read_lines: reads a text file and returns a list of stripped lines
        count_lines: counts the lines of a text file
        copy_file: copies a file in blocks of 4096 bytes
        append_log: appends a message with a timestamp to a log file
        list_files: lists all files with a given extension in a directory tree
        file_size_report: prints the sizes of the files in a folder, largest first
        find_in_files: searches for a text in all files of a folder
        rename_files: renames all files in a folder by adding a prefix
        read_config: reads key=value pairs from a configuration file
        write_csv: writes a list of dictionaries to a CSV file
        read_csv_rows: reads a CSV file into a list of dictionaries
        filter_csv: copies the rows of a CSV file that match a condition to a new file
        csv_to_json: converts a CSV file to a JSON file
        tail: returns the last n lines of a file
        remove_blank_lines: removes the blank lines from a text file
        file_checksum: computes the SHA-256 checksum of a file
        backup_file: makes a backup copy of a file with the date in its name
        zip_folder: packs a folder into a zip archive
        largest_file: finds the largest file in a directory
        replace_in_file: replaces a word in a text file
        compare_files: compares two text files line by line
        make_folders: creates a folder for each name in a list if it does not exist
        safe_write: writes a file atomically through a temporary file
        file_exists: checks whether a file exists and is readable
        split_file: splits a large text file into parts of 1000 lines
    """,
    "dates": """
        days_between: computes the number of days between two dates
        age_in_years: computes a person's age from the date of birth
        next_weekday: finds the next Monday after a given date
        format_date: formats a date as day, month name and year
        parse_date: parses a date string in the format YYYY-MM-DD
        is_weekend: checks whether a date falls on a weekend
        month_calendar: prints a calendar for a given month
        add_months: adds a number of months to a date
        business_days: counts the business days between two dates
        countdown: prints how many days are left until New Year
        day_of_year: returns the day number within the year
        last_day_of_month: returns the last day of a month
        to_timestamp: converts a datetime to a Unix timestamp
        time_ago: describes how long ago a datetime was, such as 5 minutes ago
        date_range: yields all dates from a start date to an end date
        convert_timezone: converts a datetime from UTC to another time zone
        overlapping: checks whether two date ranges overlap
        measure_time: measures how long a function call takes
        week_number: returns the ISO week number of a date
        birthday_today: checks whether today is someone's birthday
    """,
    "regex": """
        is_email: validates an email address with a regular expression
        find_phone_numbers: extracts all phone numbers from a text
        extract_urls: finds all URLs in a text
        extract_hashtags: extracts the hashtags from a social media post
        is_strong_password: checks the strength of a password
        find_dates: finds all dates of the form DD/MM/YYYY in a text
        is_hex_color: checks whether a string is a hex color code
        is_ipv4: validates an IPv4 address
        split_sentences: splits a text into sentences
        collapse_spaces: replaces runs of white space with a single space
        parse_log_line: parses a log line into time, level and message
        extract_numbers: extracts all numbers, including decimals, from a string
        censor: replaces forbidden words in a text with asterisks
        parse_query_string: parses a URL query string into a dictionary
        match_postal_code: checks a five digit postal code with an optional suffix
        remove_comments: removes comments from Python source lines
        swap_names: rewrites names from 'Last, First' to 'First Last'
        find_repeated_words: finds words that are accidentally written twice in a row
        parse_version: parses a version string such as 1.4.2 into integers
        template_fill: fills placeholders such as {{name}} in a template
    """,
    "matrices": """
        matrix_add: adds two matrices given as nested lists
        matrix_multiply: multiplies two matrices without libraries
        identity_matrix: creates an identity matrix of size n
        matrix_diagonal_sum: adds up both diagonals of a square matrix
        determinant: computes the determinant of a 3 by 3 matrix
        spiral_order: returns the elements of a matrix in spiral order
        is_symmetric: checks whether a square matrix is symmetric
        row_sums: computes the sum of every row of a matrix
        scalar_multiply: multiplies every entry of a matrix by a number
        print_matrix: prints a matrix with aligned columns
        zero_rows: sets the row and column of every zero entry to zero
        is_magic_square: checks whether a square grid is a magic square
        multiplication_table: prints a multiplication table up to n
        find_in_grid: finds the row and column of a value in a grid
        count_islands: counts the islands in a grid of land and water
        game_of_life_step: computes one step of Conway's Game of Life
        minesweeper_counts: counts the neighboring mines of each cell
        max_in_rows: finds the maximum of each row
        reshape: reshapes a flat list into rows and columns
        trace: computes the trace of a square matrix
    """,
    "graphs": """
        bfs: visits the nodes of a graph in breadth-first order
        dfs: visits the nodes of a graph in depth-first order
        shortest_path: finds the shortest path in an unweighted graph
        dijkstra: computes the shortest distances with Dijkstra's algorithm
        topological_sort: orders the nodes of a directed acyclic graph
        has_cycle: detects a cycle in a directed graph
        connected_components: finds the connected components of an undirected graph
        is_bipartite: checks whether a graph is bipartite
        adjacency_list: builds an adjacency list from a list of edges
        minimum_spanning_tree: computes a minimum spanning tree with Kruskal's algorithm
        floyd_warshall: computes all pairs of shortest distances
        bellman_ford: computes shortest paths when edges can be negative
        count_degrees: computes the degree of every node from an edge list
        path_exists: checks whether there is a path between two nodes
        all_paths: lists all simple paths between two nodes
        degrees_of_separation: finds how many friendships separate two people
        word_ladder: finds the shortest word ladder between two words
        union_find: tells whether two items are connected using union-find
        course_order: finds an order in which courses can be taken given prerequisites
        graph_to_matrix: converts an edge list to an adjacency matrix
    """,
    "trees": """
        tree_height: computes the height of a binary tree
        inorder: traverses a binary tree in order
        preorder: traverses a binary tree in preorder without recursion
        level_order: traverses a binary tree level by level
        count_leaves: counts the leaves of a binary tree
        sum_tree: adds up all the values in a binary tree
        mirror_tree: mirrors a binary tree
        is_balanced: checks whether a binary tree is balanced
        same_tree: checks whether two binary trees are identical
        lowest_common_ancestor: finds the lowest common ancestor of two tree nodes
        tree_paths: lists all paths from the root to the leaves
        tree_to_dict: converts a tree of nodes to nested dictionaries
        print_tree: prints a tree with indentation
        max_depth_nary: computes the depth of a tree whose nodes have any number of children
        directory_tree: prints the tree of a directory
        tree_max: finds the largest value in a binary tree
        build_expression_tree: builds an expression tree from postfix notation
        huffman_codes: computes Huffman codes for a table of symbol weights
        trie_autocomplete: suggests completions for a prefix using a trie
        tree_width: computes the maximum width of a binary tree
    """,
    "stacks_queues": """
        balanced_brackets: checks whether the brackets in a string are balanced
        evaluate_postfix: evaluates a postfix expression with a stack
        infix_to_postfix: converts an infix expression to postfix
        next_greater: finds for each element the next greater element
        simplify_path: simplifies a Unix style path with dots
        decode_string: decodes a string such as 3[ab] into ababab
        hot_potato: simulates the hot potato game with a queue
        sliding_window_max: computes the maximum of every sliding window with a deque
        reverse_queue: reverses a queue with a stack
        browser_history: simulates the back and forward buttons of a browser
        undo_redo: simulates undo and redo with two stacks
        stock_span: computes the stock span for a list of prices
        daily_temperatures: tells how many days to wait for a warmer day
        printer_queue: simulates a printer that handles jobs in order
        josephus: solves the Josephus problem
    """,
    "json": """
        load_json: loads a JSON file and handles a missing or broken file
        save_json: saves a dictionary as pretty printed JSON
        json_keys: collects all the keys that occur anywhere in a JSON document
        validate_record: checks that a JSON record has the required fields with the right types
        json_to_csv: converts a list of JSON objects to CSV text
        date_encoder: serializes a dictionary with dates to JSON
        filter_json: selects the users older than 30 from a JSON list
        update_setting: changes one setting in a JSON configuration file
        json_lines: reads a JSON lines file one record at a time
        json_diff: prints the differences between two JSON documents
        parse_api_response: extracts the names and prices from an API response in JSON
        to_json_dataclass: converts a dataclass instance to JSON
        json_depth: computes the nesting depth of a JSON value
        count_json_items: counts how many objects a JSON list contains
        minify_json: removes unneeded white space from JSON text
    """,
    "text": """
        wrap_text: wraps a paragraph to a given line width
        make_table: prints a list of rows as an aligned text table
        number_lines: adds line numbers to a text
        text_histogram: draws a horizontal bar chart with asterisks
        print_pyramid: prints a pyramid of stars
        print_diamond: prints a diamond of stars
        title_case: converts a title to title case but leaves small words in lower case
        justify: justifies a line of text to a given width
        acronym: builds an acronym from a phrase
        remove_stop_words: removes common stop words from a sentence
        markdown_headings: extracts the headings of a Markdown document
        markdown_link: converts a title and an address to a Markdown link
        parse_ini: parses a small INI style text into nested dictionaries
        format_currency: formats a number as dollars with thousands separators
        reading_time: estimates the reading time of an article
        box_message: prints a message inside a box
        progress_bar: prints a simple progress bar in the terminal
        indent_text: indents every line of a text by four spaces
        ordinal: converts a number to its ordinal such as 1st or 22nd
        pluralize: returns the plural of a simple English noun
    """,
    "iterators": """
        primes: yields prime numbers forever as a generator
        fibonacci_gen: yields the Fibonacci numbers as a generator
        read_in_chunks: reads a large file in chunks with a generator
        take: returns the first n items of any iterable
        sliding_window: yields sliding windows over an iterable
        batched: yields batches of n items from an iterable
        flatten_gen: flattens nested iterables lazily with yield from
        round_robin: yields items from several iterables in turn
        countdown_gen: counts down from n as a generator
        all_pairs: yields all pairs of items using itertools
        cartesian: computes the Cartesian product of several lists with itertools
        group_consecutive: groups consecutive equal items with itertools.groupby
        cycle_colors: assigns colors to items by cycling through a list
        unique_everseen: yields the unique items of an iterable in order
        enumerate_from: works like enumerate but is written from scratch
        my_zip: works like zip but is written from scratch
        my_map: works like map but is written as a generator
        pipeline: chains several generators into a data pipeline
        accumulate_products: yields running products with itertools.accumulate
        dates_forever: yields every Friday starting from a given date
    """,
    "functional": """
        compose: composes several functions into one
        curry: curries a function with two arguments
        apply_n_times: applies a function n times to a value
        my_filter: filters a list with a predicate without using filter
        my_reduce: reduces a list with a binary function without functools
        square_all: squares all the numbers of a list with a list comprehension
        sum_of_squares: computes the sum of the squares of the even numbers in a list
        max_by: returns the item with the largest key computed by a function
        partition: splits a list in two by a predicate
        make_multiplier: returns a closure that multiplies by a fixed number
        make_counter: returns a closure that counts its own calls
        pipe: passes a value through a list of functions
        lambda_sort: sorts a list of products by price with a lambda
        any_match: checks whether any item satisfies a condition
        dict_comprehension: builds a dictionary of word lengths with a comprehension
    """,
    "decorators": """
        timer: decorates another function and prints its running time
        retry: decorates another function and retries it when it raises an exception
        memoize: decorates another function and remembers its results in a dictionary
        log_calls: decorates another function and logs its arguments and its result
        count_calls: decorates another function and counts how often it is called
        validate_positive: decorates another function and rejects negative arguments
        repeat: decorates another function and runs it n times
        require_login: decorates another function and checks that a user is logged in
        deprecated: decorates another function and emits a deprecation warning
        debug: decorates another function and prints the call before running it
        rate_limit: decorates another function and limits how often it can be called
        singleton: decorates a class so that only one instance exists
        suppress_errors: works as a context manager that suppresses given exceptions
        temporary_folder: works as a context manager that creates and removes a folder
        time_block: works as a context manager that times a block of code
    """,
    "errors": """
        safe_divide: divides two numbers and handles division by zero
        parse_int: converts a string to an integer with a default for bad input
        read_number: asks the user for a number until the input is valid
        validate_age: raises a custom exception for an invalid age
        open_or_none: opens a file and returns None if it does not exist
        retry_request: retries a network call with exponential backoff
        check_type: raises a TypeError if an argument has the wrong type
        safe_get: reads a list item by index and returns a default when it is out of range
        cleanup_demo: shows how try, except, else and finally work together
        assert_sorted: raises an AssertionError if a list is not in order
        parse_key_values: parses key=value text and reports lines with errors
        convert_all: converts a list of strings to floats and collects the failures
        chain_exception: raises a new exception from the original one
        validate_form: validates a sign-up form and returns a list of error messages
        log_exception: logs an exception with its traceback
    """,
    "simulation": """
        roll_dice: rolls two dice many times and reports how often each total occurs
        coin_flips: simulates coin flips and finds the longest streak of heads
        random_walk: simulates a random walk on a line
        monte_carlo_pi: estimates pi with random points
        guess_game: plays a number guessing game with the user
        rock_paper_scissors: plays rock, paper, scissors against the computer
        hangman: plays a simple game of hangman
        tic_tac_toe_winner: finds the winner of a tic-tac-toe board
        deal_cards: shuffles a deck of cards and deals hands to players
        traffic_light: simulates a traffic light with its states
        queue_simulation: simulates customers waiting in a line at a shop
        birthday_paradox: estimates the chance that two people share a birthday
        generate_password: generates a random password with letters, digits and symbols
        predator_prey: simulates a simple predator and prey population
        bouncing_ball: simulates the height of a bouncing ball
        lottery: draws six different lottery numbers
        monty_hall: simulates the Monty Hall problem
        elevator: simulates an elevator moving between floors
        loan_schedule: prints a payment schedule for a loan
        game_loop: runs a small text adventure with three rooms
    """,
    "testing": """
        test_add: tests an add function with unittest
        test_is_prime: tests a prime checking function with pytest
        test_stack: tests a Stack class with unittest
        test_divide_error: tests that dividing by zero raises an exception
        test_parametrized: tests a function for several inputs with pytest.mark.parametrize
        test_with_fixture: tests a function that reads a file using a pytest fixture
        test_mock_api: tests code that calls an API by mocking the call
        test_sort: tests a sorting function with random lists
        test_email_validator: tests an email validator with valid and invalid addresses
        test_temperature: tests a temperature conversion with approximate equality
        test_shopping_cart: tests the total of a shopping cart
        test_output: tests what a function prints to standard output
        test_doctest: is documented and tested with doctest examples
        test_edge_cases: tests a maximum function with empty and one-element lists
        test_setup: tests a class using setUp and tearDown
    """,
    "web_and_data": """
        fetch_url: downloads a web page with urllib and returns its text
        simple_server: starts a small HTTP server that returns a greeting
        parse_args: parses command line arguments with argparse
        sqlite_insert: inserts rows into an SQLite table
        sqlite_query: reads rows from an SQLite database and prints them
        parse_xml: reads the titles of the books in an XML document
        build_html_list: builds an HTML list from Python strings
        base64_roundtrip: encodes a text as base64 and decodes it again
        hash_password: hashes a password with a salt
        thread_download: runs several downloads in threads
        async_tasks: runs several tasks concurrently with asyncio
        process_pool: squares many numbers in parallel with multiprocessing
        producer_consumer: passes items between a producer and a consumer thread
        env_setting: reads a setting from an environment variable
        logger_setup: sets up logging to a file and to the console
        url_parts: splits a URL into its parts
        uuid_list: generates a list of unique identifiers
        run_command: runs a shell command and captures its output
        scatter_plot: draws a scatter plot with matplotlib
        pandas_filter: filters the rows of a pandas DataFrame
        numpy_stats: computes basic statistics of a numpy array
        linear_regression: fits a straight line to points with least squares
        nearest_neighbor: classifies a point by its nearest neighbor
        k_means: groups points with the k-means algorithm
        xor_encrypt: encrypts bytes with a repeating XOR key
    """,
}

# Class topics: "Name: what it models", to be read after "a class `Name`".
CLASSES = """
    Stack: for a stack with push, pop, peek and is_empty
    Queue: for a first-in first-out queue
    LinkedList: for a singly linked list with append, find and delete
    DoublyLinkedList: for a doubly linked list that supports insertion at both ends
    PriorityQueue: for a priority queue based on heapq
    Rectangle: with width, height, area and perimeter
    Circle: with a radius and properties for area and diameter
    Point: for a point in the plane with distance and addition
    Vector: for a vector with operator overloading
    Fraction: for fractions with addition and multiplication
    ComplexNumber: for complex numbers
    Temperature: with conversions between Celsius and Fahrenheit
    Student: that stores grades and computes the grade average
    Employee: with a name, a salary and a method to give a raise
    Car: with speed, accelerate and brake methods
    Animal: with the subclasses Dog and Cat that override a speak method
    Shape: as an abstract base class with two concrete shapes
    Book: as a dataclass with title, author and year
    Library: that lends and returns books
    ShoppingCart: with items, quantities and a total price
    Inventory: that keeps track of products in a store
    TodoList: with adding, completing and listing tasks
    ContactBook: with adding, searching and deleting contacts
    Deck: for a deck of playing cards
    Player: for a game character with health and attacks
    Timer: that measures elapsed time as a context manager
    Logger: that writes messages with levels to a file
    Matrix: with addition and multiplication
    Polynomial: that can be evaluated and differentiated
    Trie: for storing and looking up words by prefix
    Graph: with nodes, edges and breadth-first search
    TreeNode: for a tree with children and a traversal method
    MinHeap: for a minimum heap without heapq
    HashTable: for a hash table with chaining
    CircularBuffer: for a ring buffer of fixed size
    EventEmitter: with on, off and emit methods
    StateMachine: for a simple state machine
    Observer: for the observer design pattern
    ShapeFactory: for the factory design pattern
    Singleton: for the singleton design pattern
    Iterator: that iterates over the even numbers up to a limit
    Money: with an amount, a currency and comparison
    Movie: with a title, ratings and an average rating
    ParkingLot: that tracks free and occupied spaces
    VendingMachine: that sells products and returns change
    Clock: that stores a time and can be advanced by minutes
    Calculator: with the four basic operations and a history
    Set: for a set of integers without using the built-in set
    TicTacToe: for a game of tic-tac-toe on the command line
    Quiz: that asks questions and keeps the score
    Thermostat: with a validated target temperature property
    Playlist: with songs that can be added, removed and shuffled
    Recipe: with ingredients that can be scaled to more servings
    Robot: that moves on a grid and follows commands
"""

QUESTIONS = """
    a list comprehension in Python
    the difference between a list and a tuple
    how dictionaries work in Python
    what a decorator is
    what a generator is and when to use one
    the difference between deep copy and shallow copy
    what recursion is
    the difference between a stack and a queue
    what Big O notation means
    how exceptions work in Python
    what a lambda function is
    the difference between == and is in Python
    what *args and **kwargs mean
    how the with statement works
    what a virtual environment is
    what object-oriented programming is
    inheritance in Python
    polymorphism with an example
    encapsulation in Python classes
    what a class method is and how it differs from a static method
    what self means in a Python class
    how for loops and while loops differ
    what mutable and immutable types are
    how string formatting with f-strings works
    what a hash table is
    how slicing works in Python
    what an iterator is
    how map, filter and reduce work
    the global interpreter lock
    the difference between threads and processes
    what async and await do
    what a unit test is
    what a REST API is
    what JSON is
    how regular expressions work
    what a module and a package are in Python
    how to install packages with pip
    what type hints are
    what a dataclass is
    how dynamic programming works
    what a greedy algorithm is
    how quicksort works
    what a graph is in computer science
    what a heap is
    how depth-first search works
    what a linked list is
    the difference between an array and a linked list
    what version control is
    how to create a branch in git
    what a compiler does and how it differs from an interpreter
    what a variable scope is
    what a closure is
    how default arguments behave in Python
    what a docstring is
    what the if __name__ == '__main__' idiom does
    how to debug a Python program
    what a SQL join is
    the difference between SQL and NoSQL databases
    what an index does in a database
    what a primary key is
    how HTTP requests work
    the difference between GET and POST
    what pseudocode is
    what a data structure is
    how garbage collection works in Python
    what an abstract class is
    what enumerate and zip do
    how sets work in Python
"""

FUNCTION_WORDINGS = (
    "Write a Python function that {t}.",
    "Write a Python function `{name}` that {t}. Include a docstring.",
    "How do I write Python code that {t}? Show an example.",
    "Implement in Python: a function that {t}, with a short usage example.",
    "Write Python code for `{name}`, which {t}.",
    "Please write a short, readable Python function that {t}, and explain how it works.",
    "I need a Python function called {name} that {t}. Add type hints and comments.",
    "Create a Python script with a function that {t}, then print the result for a sample input.",
    "Give me a Python function that {t}, together with two test cases.",
)
CLASS_WORDINGS = (
    "Write a Python class `{name}` {t}.",
    "Implement a class {name} {t} in Python, with a short usage example.",
    "Please write a Python class named {name} {t}. Include docstrings.",
    "Create a Python class {name} {t} and explain each method.",
    "Show me how to write a Python class `{name}` {t}.",
    "I need a Python class {name} {t}. Add type hints.",
)
QUESTION_WORDINGS = (
    "Explain {t}.",
    "Explain {t} with a short code example.",
    "Can you explain {t} to a beginner?",
    "In a few sentences, explain {t}.",
    "I am learning to program. Please explain {t}.",
)

FORBIDDEN = re.compile(
    r"fizz|buzz|binary search|bisect|reverses? a(ny)? (singly )?linked|palindrom|word (count|freq)"
    r"|count\w* (the )?words|sorted lists|merge ?sort|bank|average of a column|transpos|\blru\b|evict",
    re.IGNORECASE,
)


def table(text: str) -> list[str]:
    """Return the stripped, non-empty lines of a literal table."""
    return [line.strip() for line in text.splitlines() if line.strip()]


def build_prompts() -> list[dict[str, str]]:
    """Combine every topic with its wordings, in a shuffled but fixed order."""
    rng = random.Random(SEED)
    prompts = []

    def add(category: str, topic: str, wordings: list[tuple[int, str]], **fields: str) -> None:
        for number, wording in wordings:
            text = wording.format(**fields)
            if FORBIDDEN.search(text):
                raise ValueError(f"evaluation topic in a training prompt: {text}")
            prompts.append({"id": f"{category}-{topic}-{number}", "category": category, "prompt": text})

    for category, lines in FUNCTIONS.items():
        for line in table(lines):
            name, task = line.split(": ", 1)
            chosen = rng.sample(list(enumerate(FUNCTION_WORDINGS)), FUNCTION_WORDINGS_PER_TOPIC)
            add(category, name, sorted(chosen), name=name, t=task)
    for line in table(CLASSES):
        name, task = line.split(": ", 1)
        add("classes", name, list(enumerate(CLASS_WORDINGS)), name=name, t=task)
    for number, question in enumerate(table(QUESTIONS)):
        add("questions", f"{number:02d}", list(enumerate(QUESTION_WORDINGS)), t=question)

    rng.shuffle(prompts)
    return prompts


def main() -> None:
    for prompt in build_prompts():
        print(json.dumps(prompt))


if __name__ == "__main__":
    main()
