//! Kinds that have names: each is written once, with its name.

/// An enum of kinds without fields. It has `COUNT`, `ALL` in the order in which they are written, the `name` of each, what is
/// `named` so, and `Display`.
///
/// ```
/// vramlab_device::named! {
///     /// Which way it goes.
///     #[derive(Clone, Copy, Debug, PartialEq)]
///     pub enum Way {
///         /// Up.
///         Up "up",
///         /// Down.
///         Down "down",
///     }
/// }
///
/// assert_eq!(Way::ALL.map(Way::name), ["up", "down"]);
/// assert_eq!((Way::named("down"), Way::named("left")), (Some(Way::Down), None));
/// ```
#[macro_export]
macro_rules! named {
    ($(#[$outer:meta])* $visible:vis enum $kinds:ident { $($(#[$inner:meta])* $kind:ident $name:literal,)+ }) => {
        $(#[$outer])*
        $visible enum $kinds { $($(#[$inner])* $kind,)+ }

        impl $kinds {
            /// How many there are.
            $visible const COUNT: usize = [$($name),+].len();
            /// All of them, each at the place of its number.
            $visible const ALL: [Self; Self::COUNT] = [$(Self::$kind),+];

            /// How it is written.
            #[must_use]
            $visible fn name(self) -> &'static str {
                match self { $(Self::$kind => $name,)+ }
            }

            /// The one that is written like this.
            #[must_use]
            $visible fn named(text: &str) -> Option<Self> {
                match text {
                    $($name => Some(Self::$kind),)+
                    _ => None,
                }
            }
        }

        impl std::fmt::Display for $kinds {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.name())
            }
        }

        impl $crate::settings::Choices for $kinds {
            const ALL: &'static [Self] = &Self::ALL;

            fn name(self) -> &'static str {
                self.name()
            }
        }
    };
}
