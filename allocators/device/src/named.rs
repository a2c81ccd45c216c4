//! Enums whose variants have names: each is written once, with its name.

/// An enum without fields. It has `COUNT`, `ALL` in order, the `name` of each variant, the variant `named` by a text, and
/// `Display`.
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
            /// Number of variants.
            $visible const COUNT: usize = [$($name),+].len();
            /// All variants, each at the index of its number.
            $visible const ALL: [Self; Self::COUNT] = [$(Self::$kind),+];

            /// The name.
            #[must_use]
            $visible fn name(self) -> &'static str {
                match self { $(Self::$kind => $name,)+ }
            }

            /// The variant with this name.
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
